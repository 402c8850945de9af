"""The server behind an ASGI server: a device sees what it sees of a server with sockets of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from aparte.cloud import asgi
from aparte.cloud.asgi import AsgiApp
from aparte.cloud.keys import KeyFile, Keyring
from aparte.cloud.load import load_engine
from aparte.cloud.server import MiddleServer
from aparte.config import Cut, ServerLimits
from aparte.errors import DoorError
from aparte.fingerprint import Fingerprint
from aparte.model.parts import Blueprint
from aparte.step import ROOT
from aparte.wire.frames import ErrorFrame, Hello, ResultFrame, Welcome
from dialogue import Device, RawDevice, fingerprint_of, open_link, raw_device, unsplit_tokens, wait_until
from held import held_up
from running import FLOAT32


@contextlib.contextmanager
def behind_uvicorn(
    folder: Path, limits: ServerLimits | None = None, keys: Keyring | None = None
) -> Iterator[tuple[MiddleServer, str]]:
    """A server without a socket of its own, and the address at which uvicorn offers it."""
    engine = load_engine(Blueprint.open(folder, FLOAT32), Cut(), "tiny", limits)
    middle = MiddleServer(engine, keys=keys)
    outer = uvicorn.Server(uvicorn.Config(AsgiApp(middle), log_level="critical", lifespan="on"))
    sock = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(outer.serve([sock])), daemon=True)
    thread.start()
    try:
        wait_until(lambda: outer.started)
        yield middle, f"ws://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        outer.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def fingerprint(llama_folder: Path) -> Fingerprint:
    return fingerprint_of(llama_folder)


@pytest.fixture(scope="module")
def shared(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    limits = ServerLimits(grace_s=30, max_sessions=3)
    with behind_uvicorn(llama_folder, limits) as (server, url):
        yield server, url


@pytest.fixture
def server(shared: tuple[MiddleServer, str]) -> Iterator[MiddleServer]:
    yield shared[0]
    wait_until(lambda: shared[0].session_count == 0)


@pytest.fixture
def url(server: MiddleServer, shared: tuple[MiddleServer, str]) -> str:
    return shared[1]


def get(url: str, path: str, method: str = "GET") -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("ws://"), timeout=5)
    connection.request(method, path)
    response = connection.getresponse()
    answer = response.status, response.headers, response.read()
    connection.close()
    return answer


def test_an_answer_is_that_of_the_unsplit_model(url: str, llama_folder: Path) -> None:
    device = Device(llama_folder, open_link(llama_folder, url))
    assert device.tokens(new_tokens=12) == unsplit_tokens(llama_folder, new_tokens=12)
    device.target.close()


def test_health_and_other_pages(url: str, fingerprint: Fingerprint) -> None:
    with raw_device(url, fingerprint):
        status, headers, body = get(url, "/health")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"status": "ok", "sessions": 1}
    assert get(url, "/")[0] == 426
    assert get(url, "/health", "POST")[0] == 405


def test_errors_and_their_codes_reach_the_device(url: str, fingerprint: Fingerprint) -> None:
    other = Fingerprint(**{**fingerprint.__dict__, "tensors": "0" * 32})
    for message, code in (
        (Hello(other.to_json(), "float32"), "mismatch"),
        (b"\0\0\0\3{}}", "frame"),
    ):
        with raw_device(url) as device:
            device.send(message)
            frame = device.receive()
            assert isinstance(frame, ErrorFrame)
            assert frame.code == code
            with pytest.raises(ConnectionClosed) as closed:
                device.receive()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, code)


def test_a_full_house_says_when_to_come_again(url: str, fingerprint: Fingerprint) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(raw_device(url, fingerprint))
        with pytest.raises(InvalidStatus) as refused:
            RawDevice(url)
    assert refused.value.response.status_code == 503
    assert refused.value.response.headers["Retry-After"] == "5"


def test_a_message_that_is_too_large_ends_the_session(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    with raw_device(url, fingerprint) as device:
        device.send(bytes(server.engine.max_message_bytes))  # of the largest size: no step, but read
        assert isinstance(device.receive(), ErrorFrame)
    with raw_device(url, fingerprint) as device:
        device.send(bytes(server.engine.max_message_bytes + 1))
        with pytest.raises(ConnectionClosed) as closed:
            device.receive()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_a_device_that_sends_on_and_on_is_sent_away(
    server: MiddleServer, url: str, fingerprint: Fingerprint
) -> None:
    """A proxy in front may read without end, so the bound has to be here."""
    with held_up(server) as stage, raw_device(url, fingerprint) as device:
        device.step(1, ROOT)
        assert stage.entered.wait(5)
        with contextlib.suppress(ConnectionClosed):
            for number in range(2, 2000):
                device.step(number, ROOT)
        frame = device.receive()
        assert isinstance(frame, ErrorFrame)
        assert frame.code == "limit"
        stage.gate.set()
        wait_until(lambda: server.session_count == 0)
    assert server.cache_bytes == 0


def test_a_lost_device_goes_on_where_it_was(server: MiddleServer, url: str, fingerprint: Fingerprint) -> None:
    device = RawDevice(url)
    device.send(Hello(fingerprint.to_json(), "float32", resume=""))
    welcome = device.receive()
    assert isinstance(welcome, Welcome)
    device.step(1, ROOT, 5)
    first = device.receive()
    device.abort()
    wait_until(lambda: len(server.parking) == 1)
    device = RawDevice(url)
    device.send(Hello(fingerprint.to_json(), "float32", resume=welcome.resume))
    again = device.receive()
    assert isinstance(again, Welcome)
    assert again.resumed
    device.step(1, ROOT, 5)
    second = device.receive()
    assert isinstance(first, ResultFrame)
    assert isinstance(second, ResultFrame)
    assert bytes(first.payload) == bytes(second.payload)
    # A device whose old connection still looks alive takes its session over from it.
    newest = RawDevice(url)
    newest.send(Hello(fingerprint.to_json(), "float32", resume=welcome.resume))
    third = newest.receive()
    assert isinstance(third, Welcome)
    assert third.resumed
    with pytest.raises(ConnectionClosed):
        device.receive()
    newest.close()  # with a goodbye
    wait_until(lambda: server.cache_bytes == 0)
    assert len(server.parking) == 0


def test_tokens_are_asked_for_and_can_be_revoked(llama_folder: Path, tmp_path: Path) -> None:
    keys, first = KeyFile.create(tmp_path / "tokens")
    second = keys.add("alice")
    with behind_uvicorn(llama_folder, keys=KeyFile(tmp_path / "tokens")) as (_, url):
        with pytest.raises(InvalidStatus) as refused:
            RawDevice(url, "something else")
        assert refused.value.response.status_code == 401
        with pytest.raises(DoorError, match="refused the token"):
            open_link(llama_folder, url, token="wrong").open()
        with raw_device(url, fingerprint_of(llama_folder), second) as device:
            keys.revoke("alice")
            frame = device.receive()
            assert isinstance(frame, ErrorFrame)
            assert frame.code == "denied"
        with raw_device(url, fingerprint_of(llama_folder), first):
            pass


def test_a_server_that_cannot_answer_a_handshake_closes_it(
    url: str, monkeypatch: pytest.MonkeyPatch, fingerprint: Fingerprint
) -> None:
    """Not every ASGI server can turn a WebSocket away with a status of our choice."""
    monkeypatch.setattr(asgi, "_ANSWER", "an extension that nobody has")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(raw_device(url, fingerprint))
        with pytest.raises(InvalidStatus) as refused:
            connect(url, proxy=None)
    assert refused.value.response.status_code == 403
