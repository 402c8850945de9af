"""Who may use the gateway."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gateway.conftest import Served
from gateway.served import serving

KEY = "open-sesame"


class TestWithoutAKey:
    @pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000"])
    def test_programs_of_this_machine_may(self, served: Served, host: str) -> None:
        assert httpx.get(f"{served.url}/v1/models", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "[", ""])
    def test_a_name_that_was_bent_to_this_address_may_not(self, served: Served, host: str) -> None:
        reply = httpx.get(f"{served.url}/v1/models", headers={"host": host})
        assert reply.status_code in (400, 403)

    def test_a_page_of_another_site_may_not(self, served: Served) -> None:
        headers = {"origin": "http://evil.example", "content-type": "text/plain"}
        reply = httpx.post(f"{served.url}/v1/chat/completions", headers=headers, content=b"{}")
        assert reply.status_code == 403
        own = {"origin": served.url}
        assert httpx.get(f"{served.url}/v1/models", headers=own).status_code == 200


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with serving(served.model, key=KEY) as url:
        yield url


class TestWithAKey:
    @pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/nothing"])
    def test_only_who_has_it(self, url: str, path: str) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
            reply = httpx.get(url + path, headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        right = httpx.get(url + path, headers={"authorization": f"Bearer {KEY}"})
        assert right.status_code == (404 if path == "/nothing" else 200)

    @pytest.mark.parametrize("path", ["/", "/health", "/static/page.js"])
    def test_what_holds_nothing_is_open(self, url: str, path: str) -> None:
        assert httpx.get(url + path).status_code == 200

    def test_other_names_are_fine(self, url: str) -> None:
        headers = {"authorization": f"Bearer {KEY}", "host": "box.example"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_requests_have_a_largest_size(served: Served) -> None:
    for content in (b"x" * 16_000_001, iter([b"x" * 9_000_000, b"x" * 9_000_000])):
        headers = {"content-type": "application/json"}
        try:
            reply = httpx.post(f"{served.url}/v1/chat/completions", content=content, headers=headers)
        except httpx.WriteError:  # the gateway did not read on
            continue
        assert reply.status_code in (400, 413)
