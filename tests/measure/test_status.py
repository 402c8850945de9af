"""How a cloud says it is, and what a device makes of a cloud that says anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte import __version__
from aparte.cloud.door import pin_of, tls_context
from aparte.config import ServerLimits
from aparte.errors import DoorError, LinkError
from aparte.measure.doctor_path import Door
from aparte.measure.status import _read, status_of
from certificates import make_certificate
from dialogue import Device, fingerprint_of, open_link, raw_device
from running import running_server


def test_a_server_tells_how_it_is(llama_folder: Path) -> None:
    with running_server(llama_folder) as (server, url):
        device = Device(llama_folder, open_link(llama_folder, url))
        device.tokens(new_tokens=4)
        found = status_of(Door(url))
        assert found["memory"]["kv_bytes"] == server.cache_bytes > 0
        device.target.close()
    assert found["url"] == url
    assert 0 < found["rtt_ms"] < 1000
    assert (found["version"], found["model"], found["cut"]) == (__version__, "tiny", "2,2")
    assert found["sessions"] == {"connected": 1, "parked": 0, "most": 64, "opened": 1, "evicted": 0}
    assert found["steps"]["answered"] == 4
    assert found["last_error"] is None


def test_with_a_token_and_a_pin(llama_folder: Path, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    tls = tls_context(cert, key)
    with running_server(llama_folder, token="open-sesame", tls=tls) as (_, url):
        found = status_of(Door(url, "open-sesame", pins=(pin_of(cert),)))
        assert found["dtype"] == "float32"
        with pytest.raises(DoorError, match="another certificate"):
            status_of(Door(url, "open-sesame", pins=("sha256:" + "0" * 64,)))
        with pytest.raises(DoorError, match="refused the token"):
            status_of(Door(url, "wrong", pins=(pin_of(cert),)))
        found = status_of(Door(url, "open-sesame", cert))
    assert found["errors"] == {"denied": 1}
    assert found["last_error"]["code"] == "denied"


def test_a_full_house_is_asked_all_the_same(llama_folder: Path) -> None:
    with (
        running_server(llama_folder, limits=ServerLimits(max_sessions=1)) as (_, url),
        raw_device(url, fingerprint_of(llama_folder)),
    ):
        found = status_of(Door(url))
    assert found["rtt_ms"] is None
    assert found["sessions"]["connected"] == found["sessions"]["most"] == 1


def test_nobody_there() -> None:
    with pytest.raises(LinkError, match="cannot be reached"):
        status_of(Door("ws://127.0.0.1:1"))


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"{", b"[" * 50_000])
def test_what_is_no_status(body: bytes) -> None:
    with pytest.raises(LinkError, match="does not tell its state"):
        _read(body, "The cloud")


def test_a_cloud_can_say_nothing_else_than_numbers_and_short_words() -> None:
    told = _read(
        json.dumps(
            {
                "version": "\x1b[31m" + "x" * 9999,
                "model": 7,
                "uptime_s": "long",
                "sessions": {"connected": True, "parked": 2, "other": "y"},
                "memory": "none",
                "errors": {"\x07" * 99: 1, "frame": "many"},
                "last_error": {"code": ["x"], "seconds_ago": 3},
                "extra": "z",
            }
        ).encode(),
        "The cloud",
    )
    assert told["version"].startswith("?[31mx")
    assert len(told["version"]) == 200
    assert told["model"] == ""
    assert told["uptime_s"] is None
    assert told["sessions"] == {
        "connected": None,
        "parked": 2,
        "most": None,
        "opened": None,
        "evicted": None,
    }
    names = ("kv_bytes", "kv_idle_bytes", "kv_peak_bytes", "kv_budget_bytes")
    assert told["memory"] == dict.fromkeys(names)
    assert told["errors"] == {"?" * 32: 1, "frame": None}
    assert told["last_error"] == {"code": "", "seconds_ago": 3}
    assert "extra" not in told
