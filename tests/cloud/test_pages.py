"""``/metrics`` and ``/status`` of a real server: who may see them, and that they tell no content."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from aparte.cloud import pages
from aparte.cloud.server import MiddleServer
from aparte.cloud.telemetry import Level, Telemetry
from dialogue import Device, fingerprint_of, open_link, raw_device, wait_until
from running import running_server


def get(url: str, path: str, token: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=5)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


@pytest.fixture(scope="module")
def served(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    with running_server(llama_folder) as pair:
        yield pair


def metrics(url: str) -> dict[str, float]:
    status, body = get(url, "/metrics")
    assert status == 200
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_an_answer_shows_in_the_metrics(served: tuple[MiddleServer, str], llama_folder: Path) -> None:
    server, url = served
    before = metrics(url)
    device = Device(llama_folder, open_link(llama_folder, url))
    device.tokens(new_tokens=8)
    during = metrics(url)
    device.target.close()
    wait_until(lambda: server.session_count == 0)
    after = metrics(url)

    def rise(name: str) -> float:
        return during[name] - before[name]

    assert during['aparte_cloud_sessions{state="connected"}'] == 1
    assert during["aparte_cloud_kv_bytes"] > 0
    assert after["aparte_cloud_kv_bytes"] == 0
    assert rise("aparte_cloud_sessions_opened_total") == 1
    assert rise("aparte_cloud_steps_total") == 8
    assert rise("aparte_cloud_pass_seconds_count") == 8
    assert rise("aparte_cloud_queue_seconds_count") == 8
    assert rise("aparte_cloud_committed_tokens_total") == 46  # 40 of the prompt, and 6 that were followed
    assert rise('aparte_cloud_accepted_total{position="1"}') == rise("aparte_cloud_decided_steps_total") == 6
    assert rise('aparte_cloud_accepted_total{position="2"}') == 0
    assert rise("aparte_cloud_received_bytes_total") > 40 * 32 * 4


def test_refusals_and_errors_are_counted_by_code(
    served: tuple[MiddleServer, str], llama_folder: Path
) -> None:
    server, url = served
    before = server.counters.errors_by_code["frame"]
    with raw_device(url, fingerprint_of(llama_folder)) as device:
        device.send(b"garbage")
        device.receive()
    wait_until(lambda: server.counters.errors_by_code["frame"] == before + 1)
    told = json.loads(get(url, "/status")[1])
    assert told["errors"]["frame"] == before + 1
    assert told["last_error"]["code"] == "frame"


def test_with_tokens_both_pages_need_one(llama_folder: Path) -> None:
    with running_server(llama_folder, token="secret") as (server, url):
        for path in ("/metrics", "/status", "/metrics?x=1"):
            assert get(url, path)[0] == 401
            assert get(url, path, "wrong")[0] == 401
            status, body = get(url, path, "secret")
            assert status == 200
            assert b"secret" not in body
        assert server.counters.errors_by_code["denied"] == 6


def test_without_tokens_they_are_for_this_machine() -> None:
    telemetry = Telemetry({}, lambda: Level(0, 0, 1, 0, 0, 0, 0, None, 0))
    for path in ("/metrics", "/status"):
        for peer in ("192.0.2.7", "2001:db8::1", ""):
            answer = pages.page(path, telemetry, peer=peer, has_token=False)
            assert answer is not None
            assert answer.status_code == 403
            assert answer.body == b"Without tokens this page is for the server's own machine only.\n"
        for peer, has_token in (("127.0.0.1", False), ("::1", False), ("192.0.2.7", True)):
            answer = pages.page(path, telemetry, peer=peer, has_token=has_token)
            assert answer is not None
            assert answer.status_code == 200


def test_other_paths_are_no_pages() -> None:
    telemetry = Telemetry({}, lambda: Level(0, 0, 1, 0, 0, 0, 0, None, 0))
    for path in ("/", "/metric", "/metrics/x", "/statuses"):
        assert pages.page(path, telemetry, peer="127.0.0.1", has_token=True) is None


def test_a_full_house_still_tells_how_it_is(llama_folder: Path) -> None:
    from aparte.config import ServerLimits

    with (
        running_server(llama_folder, limits=ServerLimits(max_sessions=1)) as (_, url),
        raw_device(url, fingerprint_of(llama_folder)),
    ):
        status, body = get(url, "/status")
        assert status == 200
        assert json.loads(body)["sessions"]["connected"] == 1
