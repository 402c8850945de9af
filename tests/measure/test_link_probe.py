"""The link probe against real servers, direct and over the emulator with known figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aparte.cloud.server import MiddleServer
from aparte.config import Cut
from aparte.measure.link_probe import LinkFigures, LinkProbe, jitter
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.wire.frames import StepFrame, decode
from aparte.wire.websocket import WebSocketLink
from running import FLOAT32, running_server

WIDTH = 32


@contextmanager
def probe_over(profile: WanProfile | None, folder: Path) -> Iterator[tuple[LinkProbe, MiddleServer]]:
    with running_server(folder) as (server, url):
        address = ("127.0.0.1", urlsplit(url).port or 0)
        with WanRelay(("127.0.0.1", 0), address, profile or WanProfile()) as relay:
            where = f"ws://127.0.0.1:{relay.port}" if profile else url
            fingerprint = take_fingerprint(Blueprint.open(folder, FLOAT32), Cut(), "tiny")
            link = WebSocketLink(where, fingerprint, wire="float32", width=WIDTH)
            link.open()
            yield LinkProbe(link, WIDTH * 4), server
            link.close()


def figures(profile: WanProfile | None, folder: Path) -> LinkFigures:
    with probe_over(profile, folder) as (probe, _):
        return probe.figures()


def test_an_emulated_link_is_recognised(llama_folder: Path) -> None:
    found = figures(WanProfile(rtt_ms=40, mbps=4), llama_folder)
    assert found.rtt_ms == pytest.approx(40, abs=8)
    assert found.mbps_up == pytest.approx(4, rel=0.1)
    assert found.mbps_down == pytest.approx(4, rel=0.3)
    assert found.jitter_ms < 8
    assert found.cloud_ms > 0


def test_a_direct_link_has_a_short_round_trip(llama_folder: Path) -> None:
    found = figures(None, llama_folder)
    assert found.rtt_ms < 10
    assert found.mbps_up is None or found.mbps_up > 100


def test_stale_steps_load_only_the_way_up_and_are_not_computed(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs: list[int] = []
    send = WebSocketLink.send

    def counted(self: WebSocketLink, message: bytes) -> None:
        frame = decode(message)
        if isinstance(frame, StepFrame):
            epochs.append(frame.step.epoch)
        send(self, message)

    monkeypatch.setattr(WebSocketLink, "send", counted)
    with probe_over(None, llama_folder) as (probe, server):
        probe.figures(round_trips=4)
        assert server.counters.steps == epochs.count(probe.epoch)
        assert server.counters.stale_steps == len(epochs) - epochs.count(probe.epoch) > 0
        assert server.counters.errors == 0


def test_jitter_is_what_neighbours_differ_by() -> None:
    assert jitter([80, 90, 80, 90]) == 10
    assert jitter([80, 80, 80]) == 0
    assert jitter([80]) == 0
