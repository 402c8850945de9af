"""Emulated paths of one hop and of more, told apart by an examination."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aparte.errors import UserError
from aparte.measure.doctor import examine
from aparte.measure.doctor_compare import compare
from aparte.measure.doctor_path import Door
from aparte.measure.emulated_path import EmulatedPath
from aparte.measure.wan import WanRelay
from running import running_server

DIRECT, RELAYED = EmulatedPath.parse("60"), EmulatedPath.parse("15+120")


@contextmanager
def door_at(url: str, path: EmulatedPath) -> Iterator[Door]:
    """As :func:`emulated_path`, with the emulators in this process."""
    port = urlsplit(url).port or 0
    with ExitStack() as stack:
        for profile in reversed(path.profiles):
            relay = stack.enter_context(WanRelay(("127.0.0.1", 0), ("127.0.0.1", port), profile))
            port = relay.port
        yield Door(f"ws://127.0.0.1:{port}", near_ms=path.near_ms)


def test_a_direct_path_and_a_relayed_one_are_told_apart(llama_folder: Path) -> None:
    with (
        running_server(llama_folder) as (_, url),
        door_at(url, DIRECT) as first,
        door_at(url, RELAYED) as second,
    ):
        direct, relayed = examine(first), examine(second)
    assert direct.failure is None
    assert direct.relayed is False
    # The least of several: a busy machine makes all of them longer, and none shorter.
    assert min(direct.tcp_ms) >= 60
    assert min(direct.ping_ms) >= 60
    assert direct.first_byte_ms is not None
    assert direct.first_byte_ms >= 60
    assert relayed.relayed is True
    assert 15 <= min(relayed.tcp_ms) < 60
    assert min(relayed.ping_ms) >= 135
    assert any("A relay or proxy takes the connection" in problem for problem in relayed.problems)
    assert compare(relayed, direct).startswith(f"{first.url} is ")


class TestText:
    def test_paths(self) -> None:
        path = EmulatedPath.parse("20+220.5x100")
        assert path == EmulatedPath((20.0, 220.5), 100.0)
        assert [profile.rtt_ms for profile in path.profiles] == [20.0, 220.5]
        assert [profile.mbps for profile in path.profiles] == [None, 100.0]
        assert (path.near_ms, str(path)) == (20.0, "20 + 220.5 ms, 100 Mbit/s")
        assert str(EmulatedPath.parse("80")) == "80 ms"

    @pytest.mark.parametrize("text", ["", "+", "80+", "ax1", "80x", "80x0", "-1", "inf", "1+1+1+1+1"])
    def test_what_is_no_path(self, text: str) -> None:
        with pytest.raises(UserError):
            EmulatedPath.parse(text)
