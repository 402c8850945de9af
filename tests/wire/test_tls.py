"""A socket with TLS that one thread reads from while another writes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.sync.client import connect

from aparte.cloud.door import tls_context
from aparte.errors import UserError
from aparte.wire.tls import TurnTakingSocket, client_context
from certificates import make_certificate

#: More than sockets on loopback hold, so that writers have to wait.
MUCH = 12 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def pair(files: tuple[Path, Path]) -> Iterator[tuple[TurnTakingSocket, ssl.SSLSocket]]:
    """The device's end and the other one."""
    listening = socket.create_server(("127.0.0.1", 0))
    served = tls_context(*files)
    assert served is not None
    with listening, ThreadPoolExecutor(1) as other:
        accepted = other.submit(lambda: served.wrap_socket(listening.accept()[0], server_side=True))
        plain = socket.create_connection(listening.getsockname())
        ours = client_context(files[0], ()).wrap_socket(plain, server_hostname="127.0.0.1")
        assert isinstance(ours, TurnTakingSocket)
        with ours, accepted.result(10) as theirs:
            yield ours, theirs


def received(end: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (part := end.recv(1 << 16)):
        got += part
    return bytes(got)


def in_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_who_reads_does_not_keep_out_who_writes(pair: tuple[TurnTakingSocket, ssl.SSLSocket]) -> None:
    ours, theirs = pair
    got: list[bytes] = []
    reader = in_background(lambda: got.append(ours.recv(10)))
    for _ in range(20):
        ours.sendall(b"question")
        assert received(theirs, 8) == b"question"
    assert reader.is_alive()
    theirs.sendall(b"answer")
    reader.join(10)
    assert got == [b"answer"]


def test_more_than_fits_both_ways_at_once(pair: tuple[TurnTakingSocket, ssl.SSLSocket]) -> None:
    ours, theirs = pair
    ours.settimeout(30)
    up, down = bytes(range(256)) * (MUCH // 256), b"down" * (MUCH // 4)
    got: dict[str, bytes] = {}

    def echo_late() -> None:  # it reads nothing before its own data are out; then there is room again
        theirs.sendall(down)
        got["up"] = received(theirs, MUCH)

    other = in_background(echo_late)
    reader = in_background(lambda: got.update(down=received(ours, MUCH)))
    ours.sendall(up)
    other.join(30)
    reader.join(30)
    assert got == {"up": up, "down": down}


def test_openssl_is_never_entered_twice(
    pair: tuple[TurnTakingSocket, ssl.SSLSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    inside: list[str] = []
    met: list[list[str]] = []

    def slowly(name: str) -> Callable[..., Any]:
        call = getattr(ssl.SSLSocket, name)

        def watched(self: ssl.SSLSocket, *words: Any) -> Any:
            if self is not ours:
                return call(self, *words)
            inside.append(name)
            if len(inside) > 1:
                met.append(list(inside))
            time.sleep(0.002)
            try:
                return call(self, *words)
            finally:
                inside.remove(name)

        return watched

    for name in ("send", "recv"):
        monkeypatch.setattr(ssl.SSLSocket, name, slowly(name))
    other = in_background(lambda: [theirs.sendall(received(theirs, 4)) for _ in range(50)])
    reader = in_background(lambda: received(ours, 200))
    for _ in range(50):
        ours.sendall(b"ping")
    other.join(10)
    reader.join(10)
    assert not reader.is_alive()
    assert met == []


def test_patience_ends(pair: tuple[TurnTakingSocket, ssl.SSLSocket]) -> None:
    ours, _ = pair
    ours.settimeout(0.05)
    assert ours.gettimeout() == 0.05
    with pytest.raises(TimeoutError):
        ours.recv(1)
    with pytest.raises(TimeoutError):
        ours.sendall(bytes(MUCH))


def test_the_end_of_the_stream(pair: tuple[TurnTakingSocket, ssl.SSLSocket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"last")
    theirs.close()
    assert received(ours, 5) == b"last"
    assert ours.recv(1) == b""


def test_closing_wakes_who_reads(pair: tuple[TurnTakingSocket, ssl.SSLSocket]) -> None:
    ours, theirs = pair
    ended: list[BaseException | bytes] = []

    def read() -> None:
        try:
            ended.append(ours.recv(1))
        except (OSError, ValueError) as error:
            ended.append(error)

    reader = in_background(read)
    time.sleep(0.05)
    ours.close()
    reader.join(10)
    assert len(ended) == 1
    assert theirs.recv(1) == b""
    with pytest.raises(OSError):
        ours.recv(1)


def test_session_tickets_do_not_cross_the_first_request(files: tuple[Path, Path]) -> None:
    """Without turns one connection of some 300 hung until its timeout, or the process died."""

    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async def listen() -> int:
        server = await serve(echo, "127.0.0.1", 0, ssl=tls_context(*files))
        return int(server.sockets[0].getsockname()[1])

    loop = asyncio.new_event_loop()
    thread = in_background(loop.run_forever)
    port = asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
    context = client_context(files[0], ())
    for _ in range(200):
        with connect(f"wss://127.0.0.1:{port}", ssl=context, open_timeout=5, compression=None) as connection:
            connection.send(b"x" * 100)
            assert connection.recv(timeout=5) == b"x" * 100
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(UserError, match="not a readable PEM certificate"):
        client_context(tmp_path / "ca.pem", ())
