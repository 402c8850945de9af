"""Parking: a lost device's session waits for it, for a while, and for nobody else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK
from websockets.frames import Close

from aparte.cloud.load import load_engine
from aparte.cloud.parking import was_lost
from aparte.cloud.server import MiddleServer
from aparte.config import Cut, ServerLimits
from aparte.errors import UserError
from aparte.fingerprint import Fingerprint
from aparte.model.parts import Blueprint
from aparte.model.slab import FIRST_ROWS
from aparte.step import ROOT
from aparte.wire.frames import ErrorFrame, Hello, ResultFrame, Welcome
from dialogue import RawDevice, fingerprint_of, wait_until
from held import held_up
from running import FLOAT32, running_server


@pytest.fixture(scope="module")
def fingerprint(llama_folder: Path) -> Fingerprint:
    return fingerprint_of(llama_folder)


@pytest.fixture(scope="module")
def shared(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    with running_server(llama_folder, limits=ServerLimits(grace_s=30, max_sessions=4)) as (server, url):
        yield server, url


@pytest.fixture
def server(shared: tuple[MiddleServer, str]) -> Iterator[MiddleServer]:
    """A server on which nothing is left of the test before."""
    server = shared[0]
    yield server
    assert server._server is not None
    server._server.get_loop().call_soon_threadsafe(server.parking.close)
    wait_until(lambda: server.session_count == 0 and server.cache_bytes == 0)
    assert len(server.parking) == 0


@pytest.fixture
def url(server: MiddleServer, shared: tuple[MiddleServer, str]) -> str:
    return shared[1]


def greet(
    url: str, fingerprint: Fingerprint, resume: str | None, wire: str = "float32"
) -> tuple[RawDevice, Welcome]:
    device = RawDevice(url)
    device.send(Hello(fingerprint.to_json(), wire, resume=resume))
    frame = device.receive()
    assert isinstance(frame, Welcome), frame
    return device, frame


def park(server: MiddleServer, url: str, fingerprint: Fingerprint, steps: int = 1) -> str:
    """A session with ``steps`` nodes whose device is lost; its name."""
    before = len(server.parking)
    device, welcome = greet(url, fingerprint, "")
    for number in range(1, steps + 1):
        device.step(number, number - 2)
        assert isinstance(device.receive(), ResultFrame)
    device.abort()
    wait_until(lambda: len(server.parking) == before + 1)
    return welcome.resume


def test_a_lost_device_goes_on_where_it_was(server: MiddleServer, url: str, fingerprint: Fingerprint) -> None:
    name = park(server, url, fingerprint, steps=3)
    assert server.session_count == 0
    held = server.cache_bytes
    assert held > 0
    device, welcome = greet(url, fingerprint, name)
    assert welcome.resumed
    assert welcome.resume == name
    device.step(4, 2)  # below what was there before
    answer = device.receive()
    assert isinstance(answer, ResultFrame)
    assert answer.number == 4
    assert server.cache_bytes == held
    assert len(server.parking) == 0
    device.close()


def test_a_step_that_comes_again_is_answered_again_with_the_same(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    device, welcome = greet(url, fingerprint, "")
    answers = []
    for number, tip, count in ((1, ROOT, 5), (2, 4, 1), (3, 5, 2)):
        device.step(number, tip, count)
        answer = device.receive()
        assert isinstance(answer, ResultFrame)
        answers.append(bytes(answer.payload))
    device.abort()
    device, welcome = greet(url, fingerprint, welcome.resume)
    assert welcome.resumed
    for number, tip, count in ((2, 4, 1), (3, 5, 2)):
        device.step(number, tip, count)
        answer = device.receive()
        assert isinstance(answer, ResultFrame)
        assert answer.number == number
        assert bytes(answer.payload) == answers[number - 1]
    device.close()


def test_what_was_under_way_when_a_device_was_lost_is_computed_for_nobody(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    steps = server.counters.steps
    with held_up(server) as stage:
        device, welcome = greet(url, fingerprint, "")
        for number in range(1, 6):
            device.step(number, number - 2)
        assert stage.entered.wait(5)
        device.abort()
        again, second = greet(url, fingerprint, welcome.resume)
        assert second.resumed  # told at once, however long the pass takes
        for number in range(1, 6):
            again.step(number, number - 2)
        stage.gate.set()
        numbers = [again.receive() for _ in range(5)]
    assert [frame.number for frame in numbers if isinstance(frame, ResultFrame)] == [1, 2, 3, 4, 5]
    assert server.counters.steps - steps <= 6
    again.close()


def test_a_device_that_comes_back_before_its_loss_is_noticed_takes_over(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    """A connection that died without a word looks alive to the server for a long time."""
    half_open, welcome = greet(url, fingerprint, "")
    half_open.step(1, ROOT, 3)
    assert isinstance(half_open.receive(), ResultFrame)
    device, second = greet(url, fingerprint, welcome.resume)
    assert second.resumed
    with pytest.raises(ConnectionClosed):
        half_open.receive()
    device.step(2, 2)
    assert isinstance(device.receive(), ResultFrame)
    wait_until(lambda: server.session_count == 1)
    assert len(server.parking) == 0
    device.close()
    wait_until(lambda: server.cache_bytes == 0)


def test_after_the_grace_time_the_memory_is_free(llama_folder: Path, fingerprint: Fingerprint) -> None:
    with running_server(llama_folder, limits=ServerLimits(grace_s=0.3)) as (server, url):
        name = park(server, url, fingerprint)
        started = time.monotonic()
        assert server.cache_bytes > 0
        wait_until(lambda: server.cache_bytes == 0)
        assert time.monotonic() - started < 2
        assert len(server.parking) == 0
        device, welcome = greet(url, fingerprint, name)
        assert not welcome.resumed
        assert welcome.resume not in ("", name)
        device.close()


def test_many_lost_devices_leave_nothing_behind(llama_folder: Path, fingerprint: Fingerprint) -> None:
    limits = ServerLimits(grace_s=0.2, max_sessions=8)
    with running_server(llama_folder, limits=limits) as (server, url):
        for _ in range(40):
            with contextlib.ExitStack() as stack:
                device, _ = greet(url, fingerprint, "")
                stack.callback(device.abort)
                device.step(1, ROOT, 300)
                device.receive()
            wait_until(lambda: server._guests < 8)
            assert len(server.parking) <= 8
        wait_until(lambda: server.cache_bytes == 0 and len(server.parking) == 0)
        assert not server.parking._seats


@pytest.mark.parametrize("resume", ["", "AAAA", "x" * 64])
def test_a_name_that_nobody_has_starts_anew(
    server: MiddleServer, url: str, fingerprint: Fingerprint, resume: str
) -> None:
    parked = park(server, url, fingerprint)
    device, welcome = greet(url, fingerprint, resume)
    assert not welcome.resumed
    assert welcome.resume not in (parked, resume)
    assert len(server.parking) == 1
    device.step(1, 0)  # the slots of the parked session are not this one's
    error = device.receive()
    assert isinstance(error, ErrorFrame)
    assert error.code == "slot"


def test_names_cannot_be_guessed(server: MiddleServer, url: str, fingerprint: Fingerprint) -> None:
    names = []
    for _ in range(3):
        device, welcome = greet(url, fingerprint, "")
        names.append(welcome.resume)
        device.close()
    assert len(set(names)) == 3
    assert min(map(len, names)) >= 32  # 192 random bits


def test_another_number_format_is_another_session(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    name = park(server, url, fingerprint)
    device, welcome = greet(url, fingerprint, name, wire="float16")
    assert not welcome.resumed
    assert len(server.parking) == 1
    device.close()


@pytest.mark.parametrize("asked", [True, False])
def test_only_who_asked_for_it_is_waited_for(
    server: MiddleServer, url: str, fingerprint: Fingerprint, asked: bool
) -> None:
    device, welcome = greet(url, fingerprint, "" if asked else None)
    assert bool(welcome.resume) == asked
    device.step(1, ROOT)
    device.receive()
    device.abort()
    wait_until(lambda: server.session_count == 0)
    assert (server.cache_bytes > 0) == asked


def test_who_says_goodbye_does_not_come_back(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    device, welcome = greet(url, fingerprint, "")
    device.step(1, ROOT)
    device.receive()
    device.close()
    wait_until(lambda: server.cache_bytes == 0)
    device, second = greet(url, fingerprint, welcome.resume)
    assert not second.resumed
    device.close()


def test_a_session_that_broke_the_rules_is_not_kept(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    device, _ = greet(url, fingerprint, "")
    device.step(1, 77)
    assert isinstance(device.receive(), ErrorFrame)
    wait_until(lambda: server.session_count == 0)
    assert len(server.parking) == 0
    device.close()


def test_no_more_are_parked_than_may_be_active(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    """The longest parked leaves first."""
    names = [park(server, url, fingerprint) for _ in range(4)]
    device, _ = greet(url, fingerprint, "")
    device.step(1, ROOT)
    device.receive()
    device.abort()
    wait_until(lambda: server.session_count == 0)
    assert len(server.parking) == 4
    for name, kept in ((names[0], False), (names[1], True)):
        device, welcome = greet(url, fingerprint, name)
        assert welcome.resumed is kept
        device.close()
        wait_until(lambda: server.session_count == 0)


def test_a_parked_session_leaves_when_its_memory_is_needed(
    llama_folder: Path, fingerprint: Fingerprint
) -> None:
    engine = load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny")
    engine.probe()
    limits = ServerLimits(kv_bytes=engine.row_bytes * FIRST_ROWS)
    with running_server(llama_folder, limits=limits) as (server, url):
        name = park(server, url, fingerprint)
        device, welcome = greet(url, fingerprint, "")
        assert len(server.parking) == 0
        device.step(1, ROOT)
        assert isinstance(device.receive(), ResultFrame)
        device.close()
        wait_until(lambda: server.session_count == 0)
        device, welcome = greet(url, fingerprint, name)
        assert not welcome.resumed
        device.close()


def test_without_a_grace_time_nothing_is_kept(llama_folder: Path, fingerprint: Fingerprint) -> None:
    with running_server(llama_folder, limits=ServerLimits(grace_s=0)) as (server, url):
        device, welcome = greet(url, fingerprint, "")
        assert welcome.resume == ""
        device.step(1, ROOT)
        device.receive()
        device.abort()
        wait_until(lambda: server.cache_bytes == 0)


def test_a_grace_time_is_not_negative() -> None:
    with pytest.raises(UserError, match="grace time"):
        ServerLimits(grace_s=-1)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ConnectionClosedError(None, None), True),
        (ConnectionClosedError(None, Close(1011, "keepalive ping timeout")), True),
        (ConnectionClosedError(Close(1011, ""), Close(1011, ""), True), True),
        (ConnectionClosedOK(Close(1000, ""), Close(1000, ""), True), False),
        (ConnectionClosedOK(Close(1001, ""), Close(1001, ""), False), False),
        (ConnectionClosedError(None, Close(1009, "message too big")), False),
        (ConnectionClosedError(None, Close(1002, "protocol error")), False),
    ],
)
def test_a_loss_is_what_nobody_wanted(error: ConnectionClosed, lost: bool) -> None:
    assert was_lost(error) is lost
