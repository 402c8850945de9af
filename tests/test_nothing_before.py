"""Nothing is sent before certificate, token and model check out: servers that keep what they are sent."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aparte.cloud.door import pin_of, tls_context
from aparte.errors import DoorError, MismatchError
from aparte.fingerprint import Fingerprint
from aparte.wire.frames import Hello, Welcome, decode, encode
from certificates import make_certificate
from dialogue import Device, fingerprint_of, open_link
from relay import websocket_frames

TOKEN = "open-sesame-of-somebody"

OPEN = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
)
REFUSED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("its"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("another"))


@contextmanager
def recorder(
    certificate: tuple[Path, Path], *, lets_in: bool = True, says: bytes = b""
) -> Iterator[tuple[str, bytearray]]:
    """A TLS server by hand; yields its URL and everything that was sent through TLS so far.

    It lets a device in or not, and answers the first message with ``says``.
    """
    heard = bytearray()
    context = tls_context(*certificate)
    assert context is not None

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), context.wrap_socket(raw, server_side=True) as connection:
                connection.settimeout(5)
                while b"\r\n\r\n" not in heard:
                    data = connection.recv(65536)
                    if not data:
                        return
                    heard.extend(data)
                connection.sendall(_upgrade(bytes(heard)) if lets_in else REFUSED)
                said = False
                while data := connection.recv(65536):
                    heard.extend(data)
                    if not said and websocket_frames(bytes(heard)):
                        said = True
                        connection.sendall(b"\x82\x7e" + len(says).to_bytes(2, "big") + says)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"wss://127.0.0.1:{listener.getsockname()[1]}", heard
        listener.shutdown(socket.SHUT_RDWR)


def _upgrade(request: bytes) -> bytes:
    from websockets.utils import accept_key

    key = next(
        line.split(b": ")[1]
        for line in request.split(b"\r\n")
        if line.lower().startswith(b"sec-websocket-key")
    )
    return OPEN + accept_key(key.decode()).encode() + b"\r\n\r\n"


def attempt(folder: Path, url: str, kind: type[Exception], **door: object) -> None:
    link = open_link(folder, url, token=TOKEN, **door)  # type: ignore[arg-type]
    with pytest.raises(kind):
        Device(folder, link).tokens()
    link.close()


@pytest.mark.parametrize("way", ["pin", "authority"])
def test_another_certificate_hears_not_a_byte(
    llama_folder: Path, certificate: tuple[Path, Path], other: tuple[Path, Path], way: str
) -> None:
    door = {"pins": [pin_of(other[0])]} if way == "pin" else {"ca_file": other[0]}
    with recorder(certificate) as (url, heard):
        attempt(llama_folder, url, DoorError, **door)
    assert heard == b""


def test_who_refuses_the_token_has_heard_nothing_else(
    llama_folder: Path, certificate: tuple[Path, Path]
) -> None:
    with recorder(certificate, lets_in=False) as (url, heard):
        attempt(llama_folder, url, DoorError, pins=[pin_of(certificate[0])])
    head, _, rest = bytes(heard).partition(b"\r\n\r\n")
    assert f"authorization: bearer {TOKEN}".encode() in head.lower()
    assert rest == b""


def test_who_serves_another_model_has_heard_the_greeting_and_nothing_else(
    llama_folder: Path, certificate: tuple[Path, Path]
) -> None:
    ours = fingerprint_of(llama_folder)
    theirs = Fingerprint("theirs", ours.cut, ours.config, "0" * 32)
    says = encode(Welcome(theirs.to_json(), 512, 512))
    with recorder(certificate, says=says) as (url, heard):
        attempt(llama_folder, url, MismatchError, pins=[pin_of(certificate[0])])
    messages = [data for opcode, data in websocket_frames(bytes(heard)) if opcode == 2]
    assert [decode(message) for message in messages] == [Hello(ours.to_json(), "float32", resume="")]


def test_the_recorder_hears_what_is_said(llama_folder: Path, certificate: tuple[Path, Path]) -> None:
    """With everything in order the steps come, and are kept: the tests above would see them."""
    says = encode(Welcome(fingerprint_of(llama_folder).to_json(), 512, 512))
    with recorder(certificate, says=says) as (url, heard):
        link = open_link(llama_folder, url, token=TOKEN, pins=[pin_of(certificate[0])])
        link.open()
        link.send(b"a step")
        link.close()
    assert isinstance(tls_context(*certificate), ssl.SSLContext)
    assert b"a step" in [data for _, data in websocket_frames(bytes(heard))]
