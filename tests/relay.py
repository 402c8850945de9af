"""A TCP relay that keeps every byte, and a reader for the WebSocket messages among them."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Recording:
    """What crossed one connection: ``up`` from the device, ``down`` from the cloud."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)

    @property
    def messages_up(self) -> list[bytes]:
        return [data for opcode, data in websocket_frames(bytes(self.up)) if opcode == 2]

    @property
    def messages_down(self) -> list[bytes]:
        return [data for opcode, data in websocket_frames(bytes(self.down)) if opcode == 2]


@dataclass(frozen=True)
class Break:
    """Where a connection ends without a word: after so many bytes ``up`` or ``down``, whichever is first."""

    up: float = math.inf
    down: float = math.inf


class Relay:
    """Listens on a port of its own and forwards to ``upstream``, which may change between connections.

    The first connections end as ``breaks`` say, one each.
    """

    def __init__(self, upstream: int, breaks: Sequence[Break] = ()) -> None:
        self.upstream = upstream
        self.breaks = list(breaks)
        self.recordings: list[Recording] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._open = threading.Event()
        self._open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def recording(self) -> Recording:
        """The latest connection's."""
        return self.recordings[-1]

    def stall(self) -> None:
        """Stop reading from either side; everything then fills up."""
        self._open.clear()

    def cut(self) -> None:
        """End all connections at once, without a word."""
        _tear(*self._sockets)

    def close(self) -> None:
        self._open.set()
        self._listener.close()
        self.cut()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                device, _ = self._listener.accept()
                try:
                    cloud = socket.create_connection(("127.0.0.1", self.upstream))
                except OSError:
                    device.close()
                    continue
                for end in (device, cloud):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [device, cloud]
                recording = Recording()
                self.recordings.append(recording)
                end = self.breaks.pop(0) if self.breaks else Break()
                for source, sink, record, most in (
                    (device, cloud, recording.up, end.up),
                    (cloud, device, recording.down, end.down),
                ):
                    threading.Thread(
                        target=self._copy, args=(source, sink, record, most), daemon=True
                    ).start()

    def _copy(self, source: socket.socket, sink: socket.socket, record: bytearray, most: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                left = most - len(record)
                record += data
                self._open.wait()
                sink.sendall(data if len(data) < left else data[: int(left)])
                if len(data) >= left:
                    _tear(source, sink)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _tear(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay_to(url: str, breaks: Sequence[Break] = ()) -> Iterator[Relay]:
    """A relay in front of the server at ``url``."""
    relay = Relay(int(url.rpartition(":")[2]), breaks)
    try:
        yield relay
    finally:
        relay.close()


def websocket_frames(stream: bytes) -> list[tuple[int, bytes]]:
    """Opcode and unmasked payload of each frame in a recorded direction, after the HTTP handshake."""
    _, _, rest = stream.partition(b"\r\n\r\n")
    frames: list[tuple[int, bytes]] = []
    at = 0
    while at + 2 <= len(rest):
        assert rest[at] & 0x70 == 0, "a reserved bit is set: compression?"
        opcode, final = rest[at] & 0x0F, rest[at] & 0x80
        masked, length = rest[at + 1] & 0x80, rest[at + 1] & 0x7F
        at += 2
        if length >= 126:
            size = 2 if length == 126 else 8
            length = int.from_bytes(rest[at : at + size], "big")
            at += size
        mask = rest[at : at + 4] if masked else b"\0\0\0\0"
        at += 4 if masked else 0
        data = rest[at : at + length]
        if len(data) < length:
            break  # cut off by the end of the connection
        at += length
        assert final, "messages of this protocol are not fragmented"
        pad = (mask * (length // 4 + 1))[:length]
        frames.append(
            (opcode, (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(length, "big"))
        )
    return frames
