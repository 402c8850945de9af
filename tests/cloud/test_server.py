"""The server: sessions come and go, and whatever one of them does is its own affair."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fuzz import Attack
from safetensors.torch import load_file, save_file
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus

import aparte.cloud.server
from aparte.cloud import memory
from aparte.cloud.load import load_engine
from aparte.cloud.server import QUEUE_STEPS, MiddleServer
from aparte.config import Cut, ServerLimits
from aparte.errors import LinkError, UserError, WireOverflowError
from aparte.fingerprint import Fingerprint
from aparte.model.cache import SlotCache
from aparte.model.parts import Blueprint
from aparte.model.slab import FIRST_ROWS
from aparte.step import ROOT, Step
from aparte.wire.frames import ErrorFrame, Hello, ResultFrame, StepFrame, decode, encode
from dialogue import (
    Device,
    RawDevice,
    chain,
    fingerprint_of,
    open_link,
    raw_device,
    unsplit_tokens,
    wait_until,
)
from held import GatedStage, held_up
from relay import websocket_frames
from running import FLOAT32, running_server
from tiny import save_tiny

WIDTH = 32


@pytest.fixture(scope="module")
def fingerprint(llama_folder: Path) -> Fingerprint:
    return fingerprint_of(llama_folder)


@pytest.fixture(scope="module")
def shared(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    with running_server(llama_folder) as (server, url):
        yield server, url


@pytest.fixture
def server(shared: tuple[MiddleServer, str]) -> Iterator[MiddleServer]:
    """A server without sessions, before and after."""
    assert_empty(shared[0])
    yield shared[0]
    assert_empty(shared[0])


@pytest.fixture
def url(server: MiddleServer, shared: tuple[MiddleServer, str]) -> str:
    return shared[1]


def assert_empty(server: MiddleServer) -> None:
    wait_until(lambda: server.session_count == 0)
    wait_until(lambda: server.cache_bytes == 0)  # at the end of a pass that is under way


def refusal(device: RawDevice, code: str) -> str:
    """The message of the error frame that comes next; the connection is closed behind it."""
    frame = device.receive()
    assert isinstance(frame, ErrorFrame), frame
    assert frame.code == code
    with pytest.raises(ConnectionClosed):
        device.receive()
    return frame.message


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def health(url: str) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(url), timeout=2)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert response.status == 200
    body: dict[str, object] = json.loads(response.read())
    connection.close()
    return body


# -- A session -------------------------------------------------------------------------------------


def test_the_welcome_says_what_is_served_and_allowed(url: str, fingerprint: Fingerprint) -> None:
    with raw_device(url) as device:
        welcome = device.greet(fingerprint)
    assert Fingerprint.from_json(welcome.fingerprint) == fingerprint
    assert welcome.max_nodes == ServerLimits().max_nodes_per_step
    assert welcome.max_context == 512


def test_steps_are_answered_in_order_with_their_times(url: str, fingerprint: Fingerprint) -> None:
    with raw_device(url, fingerprint) as device:
        device.step(1, ROOT, 5)
        device.step(2, 4)
        device.step(3, 5)
        for number, nodes in ((1, 5), (2, 1), (3, 1)):
            frame = device.receive()
            assert isinstance(frame, ResultFrame)
            assert frame.number == number
            assert len(frame.payload) == nodes * WIDTH * 4
            assert frame.compute_ms > 0


def test_time_in_the_queue_is_not_compute_time(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    with held_up(server) as stage, raw_device(url, fingerprint) as device:
        device.step(1, ROOT)
        device.step(2, 0)
        assert stage.entered.wait(5)
        time.sleep(0.2)
        stage.gate.set()
        first, second = device.receive(), device.receive()
    assert isinstance(first, ResultFrame)
    assert isinstance(second, ResultFrame)
    assert first.compute_ms > 190
    assert first.queue_ms < 100
    assert second.compute_ms < 100
    assert second.queue_ms > 150


# -- Ends ------------------------------------------------------------------------------------------


def test_a_session_is_freed_when_the_device_says_goodbye(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    with raw_device(url, fingerprint) as device:
        device.step(1, ROOT, 5)
        device.receive()
        assert server.session_count == 1
        assert server.cache_bytes > 0
    assert_empty(server)


def test_fifty_devices_that_vanish_leave_nothing(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    """Some before their answer, some after it, some with a queue full of steps."""
    for index in range(50):
        device = RawDevice(url)
        device.greet(fingerprint)
        device.step(1, ROOT, 3)
        if index % 3 == 0:
            device.receive()
        if index % 3 == 1:
            for number in range(2, 2 + 3 * QUEUE_STEPS):
                device.step(number, number)
        device.abort()
    assert_empty(server)
    wait_until(lambda: not tasks_of(server))


def test_two_hundred_aborted_sessions_give_everything_back(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    """A device that was there all the time keeps what it has, to the byte."""
    with raw_device(url, fingerprint) as steady:
        steady.step(1, ROOT, 3)
        steady.receive()
        baseline = server.cache_bytes
        for _ in range(200):
            device = RawDevice(url)
            device.greet(fingerprint)
            device.step(1, ROOT, 300)
            device.step(2, 299)
            device.abort()
        wait_until(lambda: server.session_count == 1, 30)
        wait_until(lambda: server.cache_bytes == baseline > 0)  # the pass of the last one may be under way
        # What lies idle is what those had that were there at a time, 64 with twice the first size at most.
        assert server.memory.slab.idle <= server.memory.slab.peak <= (64 * 2 + 1) * baseline
        steady.step(2, 2)
        assert isinstance(steady.receive(), ResultFrame)


def test_memory_that_lies_idle_goes_back_to_the_system(
    server: MiddleServer, url: str, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TIDY_INTERVAL_S", 0.02)
    monkeypatch.setattr(memory, "IDLE_S", 0.3)
    slab = server.memory.slab
    with running_tidily(server), raw_device(url, fingerprint) as device:
        device.step(1, ROOT, 300)
        device.receive()
        time.sleep(0.4)
        held = slab.used
        assert held > 0, "in use, so not idle"
        device.close()
        wait_until(lambda: slab.idle >= held)
        wait_until(lambda: slab.idle == 0)
        assert slab.used == 0


@contextlib.contextmanager
def running_tidily(server: MiddleServer) -> Iterator[None]:
    """The server's chore once more, with the intervals of the test."""
    assert server._server is not None
    chore = asyncio.run_coroutine_threadsafe(server.memory.tidy(), server._server.get_loop())
    try:
        yield
    finally:
        chore.cancel()


def tasks_of(server: MiddleServer) -> list[object]:
    """Coroutines that the server is running, besides those that it always does."""
    assert server._server is not None
    tasks = asyncio.all_tasks(server._server.get_loop()) - set(server._chores)
    return [task.get_coro() for task in tasks]


def test_a_device_that_vanishes_during_its_forward_pass(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    with held_up(server) as stage:
        device = RawDevice(url)
        device.greet(fingerprint)
        for number in range(1, 60):  # more than all queues hold
            device.step(number, number - 2)
        assert stage.entered.wait(5)
        device.abort()
        time.sleep(0.05)
    assert_empty(server)


def test_an_idle_session_expires(llama_folder: Path, fingerprint: Fingerprint) -> None:
    with running_server(llama_folder, limits=ServerLimits(idle_s=0.3)) as (server, url):
        device = RawDevice(url)
        device.greet(fingerprint)
        for number in range(1, 5):  # longer than the limit, but never idle for so long
            device.step(number, number - 2)
            assert isinstance(device.receive(), ResultFrame)
            time.sleep(0.1)
        assert server.session_count == 1
        started = time.monotonic()
        assert "idle for too long" in refusal(device, "expired")
        assert 0.15 < time.monotonic() - started < 3
        assert_empty(server)
        device.close()


def test_a_session_does_not_expire_while_it_waits_for_its_own_answer(
    llama_folder: Path, fingerprint: Fingerprint
) -> None:
    with (
        running_server(llama_folder, limits=ServerLimits(idle_s=0.3)) as (server, url),
        held_up(server) as stage,
        raw_device(url, fingerprint) as one,
        raw_device(url, fingerprint) as other,
    ):
        one.step(1, ROOT)
        assert stage.entered.wait(5)
        other.step(1, ROOT)  # waits for the worker
        time.sleep(0.8)
        assert server.session_count == 2
        stage.gate.set()
        assert isinstance(one.receive(), ResultFrame)
        assert isinstance(other.receive(), ResultFrame)


def test_the_cache_of_an_expired_session_is_freed_even_if_its_device_reads_nothing(
    llama_folder: Path, fingerprint: Fingerprint
) -> None:
    with (
        running_server(llama_folder, limits=ServerLimits(idle_s=0.3)) as (server, url),
        deaf_device(url, fingerprint),
    ):
        wait_until(lambda: server.session_count == 1)
        wait_until(lambda: server.session_count == 0, 1.5)


@contextlib.contextmanager
def deaf_device(url: str, fingerprint: Fingerprint) -> Iterator[socket.socket]:
    """A greeted connection whose device never reads or answers anything."""
    hello = encode(Hello(fingerprint.to_json(), "float32"))
    with socket.create_connection(("127.0.0.1", port_of(url))) as connection:
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        connection.sendall(b"\x82\xfe" + len(hello).to_bytes(2, "big") + b"\0\0\0\0" + hello)
        yield connection


def test_closing_the_server_ends_its_sessions(llama_folder: Path, fingerprint: Fingerprint) -> None:
    with contextlib.ExitStack() as stack:
        server, url = stack.enter_context(running_server(llama_folder))
        device = RawDevice(url)
        device.greet(fingerprint)
        stack.close()
        assert server.session_count == 0
        with pytest.raises(ConnectionClosed) as caught:
            device.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001


def test_a_port_that_is_taken_is_a_users_mistake(llama_folder: Path, url: str) -> None:
    async def start() -> None:
        engine = load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny")
        server = MiddleServer(engine)
        try:
            await server.start("127.0.0.1", port_of(url))
        finally:
            await server.close()

    with pytest.raises(UserError, match="Choose another --port"):
        asyncio.run(start())


# -- The door --------------------------------------------------------------------------------------


def test_health_answers_during_a_long_forward_pass(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    with held_up(server) as stage, raw_device(url, fingerprint) as device:
        device.step(1, ROOT)
        assert stage.entered.wait(5)
        waits = []
        for _ in range(5):
            started = time.monotonic()
            assert health(url) == {"status": "ok", "sessions": 1}
            waits.append(time.monotonic() - started)
        assert min(waits) < 0.1
        stage.gate.set()
        assert isinstance(device.receive(), ResultFrame)


def test_pings_are_answered_during_a_long_forward_pass(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    with held_up(server) as stage, raw_device(url, fingerprint) as busy, raw_device(url) as other:
        busy.step(1, ROOT)
        assert stage.entered.wait(5)
        for device in (busy, other):
            waits = []
            for _ in range(5):
                started = time.monotonic()
                assert device.connection.ping().wait(5)
                waits.append(time.monotonic() - started)
            assert min(waits) < 0.1
        stage.gate.set()
        assert isinstance(busy.receive(), ResultFrame)


def test_health_needs_no_token_and_everything_else_does(llama_folder: Path) -> None:
    with running_server(llama_folder, token="secret") as (server, url):
        assert health(url) == {"status": "ok", "sessions": 0}
        for token in (None, "Secret", "secre", "\u00fc"):
            with pytest.raises(InvalidStatus) as caught:
                RawDevice(url, token)
            assert caught.value.response.status_code == 401
        assert server.counters.errors == 4
        RawDevice(url, "secret").close()


def test_a_full_house_turns_away(llama_folder: Path, fingerprint: Fingerprint) -> None:
    with (
        running_server(llama_folder, limits=ServerLimits(max_sessions=2)) as (server, url),
        raw_device(url, fingerprint),
        raw_device(url) as second,  # a guest who says nothing takes a place, too
    ):
        with pytest.raises(LinkError, match=r"is full\. Try again later"):
            open_link(llama_folder, url).open()
        second.close()
        wait_until(lambda: server._guests == 1)
        with raw_device(url, fingerprint) as third:
            third.step(1, ROOT)
            assert isinstance(third.receive(), ResultFrame)


def one_session(folder: Path) -> ServerLimits:
    """Memory for one short text."""
    engine = load_engine(Blueprint.open(folder, FLOAT32), Cut(), "tiny")
    engine.probe()
    return ServerLimits(kv_bytes=engine.row_bytes * FIRST_ROWS)


def test_an_idle_session_leaves_when_its_memory_is_needed(
    llama_folder: Path, fingerprint: Fingerprint
) -> None:
    with (
        running_server(llama_folder, limits=one_session(llama_folder)) as (server, url),
        raw_device(url, fingerprint) as idle,
    ):
        idle.step(1, ROOT)
        assert isinstance(idle.receive(), ResultFrame)
        with raw_device(url, fingerprint) as other:
            assert "needed for others" in refusal(idle, "expired")
            other.step(1, ROOT)
            assert isinstance(other.receive(), ResultFrame)
            assert server.memory.held == server.memory.budget


def test_a_step_that_finds_no_memory_is_told_when_to_come_again(
    llama_folder: Path, fingerprint: Fingerprint
) -> None:
    with (
        running_server(llama_folder, limits=one_session(llama_folder)) as (server, url),
        raw_device(url, fingerprint) as device,
    ):
        for number, tip in ((1, ROOT), (2, 199)):
            device.step(number, tip, 200)
        assert isinstance(device.receive(), ResultFrame)
        assert "Try again in" in refusal(device, "busy")
        wait_until(lambda: server.memory.held == 0)


def test_a_device_is_refused_while_all_memory_is_in_use(llama_folder: Path, fingerprint: Fingerprint) -> None:
    with (
        running_server(llama_folder, limits=one_session(llama_folder)) as (server, url),
        raw_device(url, fingerprint) as busy,
    ):
        busy.step(1, ROOT)
        assert isinstance(busy.receive(), ResultFrame)
        with held_up(server) as stage:
            busy.step(2, 0)
            wait_until(lambda: next(iter(server._sessions.values())).unanswered == 1)
            with raw_device(url) as other:
                other.send(Hello(fingerprint.to_json(), "float32"))
                assert "Try again in" in refusal(other, "busy")
            stage.gate.set()
            assert isinstance(busy.receive(), ResultFrame)


def test_a_rush_through_the_door_does_not_overfill_the_house(
    llama_folder: Path, fingerprint: Fingerprint
) -> None:
    hello = encode(Hello(fingerprint.to_json(), "float32"))

    async def visit(url: str) -> str:
        try:
            async with connect_async(url, compression=None, proxy=None, close_timeout=1) as connection:
                await connection.send(hello)
                frame = decode(await connection.recv(decode=False))
                await asyncio.sleep(0.3)
                return frame.code if isinstance(frame, ErrorFrame) else "welcome"
        except (InvalidStatus, ConnectionClosed):
            return "turned away"

    async def rush(url: str) -> list[str]:
        return await asyncio.gather(*(visit(url) for _ in range(12)))

    with running_server(llama_folder, limits=ServerLimits(max_sessions=3)) as (server, url):
        outcomes = asyncio.run(rush(url))
        assert outcomes.count("welcome") == 3
        assert set(outcomes) <= {"welcome", "busy", "turned away"}
        assert server.counters.sessions_opened == 3


# -- Greetings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "code", "told"),
    [
        pytest.param(chain(1, ROOT), "frame", "not a greeting", id="a step"),
        pytest.param(ResultFrame(1, 0.0, 0.0, b""), "frame", "not a greeting", id="a result"),
        pytest.param(ErrorFrame("frame", "x"), "frame", "not a greeting", id="an error"),
        pytest.param(b"", "frame", "shorter", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "frame", "longer", id="garbage"),
        pytest.param(b"\0\0\0\2{}", "frame", "unknown kind", id="an empty header"),
        pytest.param(Hello({}, "float32"), "mismatch", "fingerprint", id="no fingerprint"),
        pytest.param(Hello({}, "float32", version=2), "mismatch", "Install the same version", id="version"),
    ],
)
def test_what_is_not_a_greeting_is_refused(url: str, first: StepFrame | bytes, code: str, told: str) -> None:
    with raw_device(url) as device:
        device.send(first)
        assert told in refusal(device, code)


def test_an_unknown_number_format_is_refused(url: str, fingerprint: Fingerprint) -> None:
    with raw_device(url) as device:
        device.send(Hello(fingerprint.to_json(), "int1"))
        assert "float16, bfloat16, float32" in refusal(device, "mismatch")


def test_a_device_that_does_not_greet_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aparte.cloud.server, "HELLO_TIMEOUT_S", 0.2)
    with raw_device(url) as device:
        started = time.monotonic()
        assert "No greeting came" in refusal(device, "frame")
        assert 0.1 < time.monotonic() - started < 3


# -- Limits ----------------------------------------------------------------------------------------


def spoiled_size(frame: StepFrame, difference: int) -> bytes:
    return encode(frame)[:difference] if difference < 0 else encode(frame) + bytes(difference)


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        pytest.param(chain(2, 4, 513), "limit", "513 nodes; this server takes 512", id="nodes"),
        pytest.param(
            StepFrame(Step(2, 0, ROOT, 2100, (ROOT,)), bytes(128)), "limit", "uncommitted", id="pending"
        ),
        pytest.param(spoiled_size(chain(2, 4), -1), "frame", "should carry", id="payload too short"),
        pytest.param(spoiled_size(chain(2, 4), 4), "frame", "should carry", id="payload too long"),
        pytest.param(StepFrame(chain(2, 4, 3).step, b""), "frame", "should carry", id="no payload"),
        pytest.param(StepFrame(chain(2, 4).step, b"\xff" * 128), "frame", "not finite", id="not numbers"),
        pytest.param(chain(2, 9), "slot", "does not hold", id="a slot that is not held"),
        pytest.param(b"garbage", "frame", "longer", id="garbage"),
        pytest.param(Hello({}, "float32"), "frame", "not a step", id="a second greeting"),
    ],
)
def test_a_step_against_the_rules_ends_the_session(
    url: str, fingerprint: Fingerprint, message: StepFrame | bytes, code: str, told: str
) -> None:
    with raw_device(url, fingerprint) as device:
        device.step(1, ROOT, 5)
        device.receive()
        device.send(message)
        assert told in refusal(device, code)


def test_steps_before_a_broken_one_are_answered(url: str, fingerprint: Fingerprint) -> None:
    with raw_device(url, fingerprint) as device:
        device.step(1, ROOT, 5)
        device.step(2, 4)
        device.send(b"garbage")
        assert isinstance(device.receive(), ResultFrame)
        assert isinstance(device.receive(), ResultFrame)
        refusal(device, "frame")


def test_a_sequence_longer_than_the_context_ends_the_session(url: str, fingerprint: Fingerprint) -> None:
    with raw_device(url, fingerprint) as device:
        for number in range(6):
            device.step(number, 512 * number - 1, 512)
        frames = [device.receive() for _ in range(6)]
    assert [type(frame) for frame in frames] == [ResultFrame] * 5 + [ErrorFrame]
    assert isinstance(frames[-1], ErrorFrame)
    assert frames[-1].code == "slot"
    assert "outgrow" in frames[-1].message


def test_a_message_larger_than_any_step_is_closed_unread(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    """Its length says so before its body has come: a few bytes are enough to be refused."""
    size = server.engine.max_message_bytes + 1
    with deaf_device(url, fingerprint) as connection:
        wait_until(lambda: server.session_count == 1)
        connection.sendall(b"\x82\xff" + size.to_bytes(8, "big") + b"\0\0\0\0")
        connection.settimeout(5)
        heard = b""
        while data := connection.recv(4096):
            heard += data
        opcode, reason = websocket_frames(heard)[-1]
    assert opcode == 8
    assert int.from_bytes(reason[:2], "big") == 1009


def test_a_message_of_the_largest_size_is_read(url: str, fingerprint: Fingerprint) -> None:
    with raw_device(url, fingerprint) as device:
        device.send(bytes(512 * WIDTH * 4 + 65_536))
        assert "not JSON" in refusal(device, "frame")


def test_an_overflow_on_the_cloud_reaches_the_device_with_its_way_out(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save_tiny("llama", tmp_path_factory.mktemp("hot"))
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.3.mlp.down_proj.weight"] *= 1e6  # a middle layer
    save_file(weights, file, metadata={"format": "pt"})
    with running_server(folder) as (_, url):
        device = Device(folder, open_link(folder, url, wire="float16"), wire="float16")
        with pytest.raises(WireOverflowError, match="--wire bfloat16"):
            device.tokens()


# -- Epochs ----------------------------------------------------------------------------------------


def test_queued_steps_of_an_older_epoch_are_dropped_and_counted(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    stale, steps = server.counters.stale_steps, server.counters.steps
    with held_up(server) as stage, raw_device(url, fingerprint) as device:
        device.step(1, ROOT, 3)
        assert stage.entered.wait(5)
        for number in (2, 3, 4):
            device.step(number, number)
        device.step(5, 2, 2, epoch=1)
        device.step(6, 4, epoch=0)  # late, and worthless too
        device.step(7, 4, epoch=1)
        assert device.connection.ping().wait(5)  # everything before it has arrived
        time.sleep(0.05)
        stage.gate.set()
        numbers = []
        for _ in range(3):
            frame = device.receive()
            assert isinstance(frame, ResultFrame)
            numbers.append(frame.number)
    assert numbers == [1, 5, 7]
    assert server.counters.stale_steps == stale + 4
    wait_until(lambda: server.counters.steps == steps + 3)


# -- Neighbours ------------------------------------------------------------------------------------


@contextlib.contextmanager
def undisturbed(folder: Path, url: str) -> Iterator[None]:
    """One device asks all the while and gets the right answer every time."""
    truth = unsplit_tokens(folder)
    device = Device(folder, open_link(folder, url))
    stop, answers, failures = threading.Event(), [0], list[Exception]()

    def ask() -> None:
        try:
            while not stop.is_set() or not answers[0]:
                assert device.tokens() == truth
                answers[0] += 1
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        device.target.close()
    assert not failures, failures
    assert answers[0]


def test_devices_that_share_passes_write_what_each_writes_alone(
    llama_folder: Path, server: MiddleServer, url: str
) -> None:
    """Prompts of many lengths at once, the longest of several pieces: the same tokens, one by one."""
    prompts = [tuple(range(20, 20 + length)) for length in (3, 17, 40, 64, 150, 200)]
    expected = [unsplit_tokens(folder=llama_folder, prompt=prompt, new_tokens=10) for prompt in prompts]
    shared = server.scheduler.shared_passes
    devices = [Device(llama_folder, open_link(llama_folder, url)) for _ in prompts]

    def answer(index: int) -> list[list[int]]:
        return [devices[index].tokens(prompts[index], 10, chunk=256) for _ in range(3)]

    with ThreadPoolExecutor(len(devices)) as pool:
        answers = list(pool.map(answer, range(len(devices))))
    for device in devices:
        device.target.close()
    assert answers == [[tokens] * 3 for tokens in expected]
    assert server.scheduler.shared_passes > shared


def test_bad_sessions_do_not_disturb_one_that_generates(
    llama_folder: Path, server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    def misbehave(device: RawDevice, index: int) -> None:
        bad: list[Callable[[], None]] = [
            lambda: device.send(b"garbage"),
            lambda: device.send(chain(2, 77)),
            lambda: device.send(chain(2, 2, 513)),
            lambda: device.send(bytes(server.engine.max_message_bytes + 1)),
            device.abort,
        ]
        bad[index % len(bad)]()

    with undisturbed(llama_folder, url):
        for index in range(20):
            device = RawDevice(url)
            device.greet(fingerprint)
            device.step(1, ROOT, 3)
            with contextlib.suppress(ConnectionClosed):
                misbehave(device, index)
            device.close()


def test_an_internal_error_ends_one_session_and_tells_nobody_what_it_was(
    llama_folder: Path,
    server: MiddleServer,
    url: str,
    fingerprint: Fingerprint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(GatedStage):
        def forward(self, cache: SlotCache, step: Step, hidden: torch.Tensor) -> torch.Tensor:
            raise RuntimeError(f"cannot multiply {hidden}")

    with raw_device(url, fingerprint) as device:
        monkeypatch.setattr(server.engine, "_stage", Failing(server.engine._stage))
        with raw_device(url, fingerprint) as other:
            other.step(1, ROOT)
            assert refusal(other, "internal") == "The server failed while computing this step."
        monkeypatch.undo()
        device.step(1, ROOT)
        assert isinstance(device.receive(), ResultFrame)
    assert "code=internal type=RuntimeError" in caplog.text
    assert "multiply" not in caplog.text


#: All that an event of the log may say: its name, and fields that are numbers, codes or a token's name.
LOG_LINE = re.compile(
    r"(session_start|session_end|session_error|refused)"
    r"( (session|seconds|steps|stale_steps|nodes|bytes_up|bytes_down)=[\d.]+"
    r"| (resumed|parked)=(True|False)| token=default| code=[a-z]+)+"
)


def test_logs_hold_nothing_of_messages_or_headers(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even when everything logs at its most talkative level."""
    caplog.set_level(logging.DEBUG)
    with running_server(llama_folder, token="hush-hush") as (_, url):
        fingerprint = fingerprint_of(llama_folder)
        device = Device(llama_folder, open_link(llama_folder, url, token="hush-hush"))
        device.tokens()
        device.target.close()
        for bad in (b"garbage", chain(2, 123_456), chain(2, 4, 513), spoiled_size(chain(2, 4), -1)):
            with raw_device(url, fingerprint, "hush-hush") as raw:
                raw.step(1, ROOT, 5)
                raw.send(bad)
        with contextlib.suppress(InvalidStatus):
            RawDevice(url, "wrong-token")
        with socket.create_connection(("127.0.0.1", port_of(url))) as connection:
            connection.sendall(b"Authorization: Bearer hush-hush\r\n\r\n")
            connection.recv(100)
    ours = [record for record in caplog.records if record.name.startswith(("aparte", "websockets.server"))]
    assert len(ours) >= 10
    for record in ours:
        assert LOG_LINE.fullmatch(record.getMessage()), record.getMessage()
        assert record.exc_info is None


# -- Fuzzing ---------------------------------------------------------------------------------------

#: `benchmarks/fuzz.py` sends 100,000.
FUZZED_MESSAGES = 2000


def test_broken_messages_never_crash_the_server(
    llama_folder: Path,
    server: MiddleServer,
    url: str,
    fingerprint: Fingerprint,
) -> None:
    """Mutations of real ones, and what hypothesis makes up, beside a device that must not notice."""
    recorded = [
        encode(Hello(fingerprint.to_json(), "float32")),
        encode(chain(1, ROOT, 4)),
        encode(chain(2, 3)),
        encode(StepFrame(Step(3, 0, 4, 5, (4, 4, 5, 6)), random.Random(0).randbytes(4 * WIDTH * 4))),
        encode(chain(4, 4, 2, epoch=1)),
    ]
    internal = server.counters.errors_by_code["internal"]
    attack = Attack(url, recorded, FUZZED_MESSAGES, seed=0)
    with undisturbed(llama_folder, url):
        asyncio.run(attack.run())
    assert attack.sent >= FUZZED_MESSAGES // 2  # a session ends with its first bad message
    assert health(url)["status"] == "ok"
    assert server.counters.errors_by_code["internal"] == internal
    assert "internal" not in attack.answers, attack.answers
    assert {"frame", "slot", "mismatch", "ResultFrame"} <= set(attack.answers), attack.answers
