"""One emulated link: what it is like, and a connection that runs over it in both directions.

Sockets and queues only; when to read, write and wait is decided by :mod:`aparte.measure.wan`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import random
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from aparte.errors import UserError

FD_SETSIZE = 1024  # select() knows no descriptor at or above this

_MIN_BUFFER_BYTES = 1 << 20
_UNLIMITED_BUFFER_BYTES = 64 << 20  # 12 Gbit/s at an 80 ms round trip, more than this relay can copy
_MAX_CHUNK_BYTES = 256 << 10
_MIN_CHUNK_BYTES = 1448  # what one Ethernet packet carries
_CHUNK_S = 1e-3  # a chunk takes about this long on a limited link, so that arrivals look like a stream


@dataclass(frozen=True)
class WanProfile:
    """What the link is like.

    ``rtt_ms`` is the round trip, half of it each way. ``jitter_ms`` is the most that is added to a
    chunk's way, uniformly from zero, in each direction. ``mbps`` is the bandwidth of each direction in
    10^6 bits of payload per second (None: unlimited). After ``drop_after`` bytes, both directions of a
    connection counted together, that connection is reset on both sides (None: never). They count when
    handed to the receiving side's kernel, where a reset discards what its receive window has no room
    for yet: a receiver that keeps up gets exactly that many bytes, and none gets more.
    """

    rtt_ms: float = 0
    jitter_ms: float = 0
    mbps: float | None = None
    drop_after: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("round trip", self.rtt_ms), ("jitter", self.jitter_ms)):
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"A {name} of {value} ms is not possible; give 0 or more milliseconds.")
        if self.mbps is not None and not (math.isfinite(self.mbps) and self.mbps > 0):
            raise UserError(
                f"A bandwidth of {self.mbps} Mbit/s lets nothing through; give more than 0, or leave it "
                "out for an unlimited link."
            )
        if self.drop_after is not None and self.drop_after < 1:
            raise UserError(
                f"A connection cannot be dropped after {self.drop_after} bytes; give 1 or more, or leave "
                "it out to keep connections."
            )

    def __str__(self) -> str:
        parts = [f"{self.rtt_ms:g} ms round trip"]
        if self.jitter_ms:
            parts.append(f"up to {self.jitter_ms:g} ms jitter each way")
        parts.append(f"{self.mbps:g} Mbit/s each way" if self.mbps else "unlimited bandwidth")
        if self.drop_after:
            parts.append(f"reset after {self.drop_after} bytes")
        return ", ".join(parts)

    @property
    def rtt_s(self) -> float:
        """The round trip in seconds."""
        return self.rtt_ms / 1e3

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes per second and direction; infinite when unlimited."""
        return math.inf if self.mbps is None else self.mbps * 1e6 / 8

    @property
    def buffer_bytes(self) -> int:
        """How many bytes of one direction may wait in the relay: twice what the link itself holds."""
        if self.mbps is None:
            return _UNLIMITED_BUFFER_BYTES
        worst_rtt_s = self.rtt_s + 2 * self.jitter_ms / 1e3
        return max(_MIN_BUFFER_BYTES, int(2 * self.bytes_per_s * worst_rtt_s))

    @property
    def chunk_bytes(self) -> int:
        """The most bytes that are read, and so arrive, at once."""
        return int(min(max(self.bytes_per_s * _CHUNK_S, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))


Address = tuple[int, Any]  # address family, address as the socket module wants it


class End(enum.Enum):
    """How a direction ends."""

    EOF = enum.auto()
    RESET = enum.auto()


class ResetError(Exception):
    """The connection is to be reset on both sides now."""


class Way:
    """One direction of a connection: what was read from ``source`` and has not reached ``sink`` yet."""

    def __init__(
        self, profile: WanProfile, source: socket.socket, sink: socket.socket, open_at: float
    ) -> None:
        self.source = source
        self.sink = sink
        self.queue: deque[tuple[float, memoryview | End]] = deque()
        self.in_flight_bytes = 0
        self.reading = True  # until the source has ended
        self.blocked = False  # the sink's kernel buffer is full, or it is not connected yet
        self._profile = profile
        self._link_free = open_at
        self._last_due = 0.0

    @property
    def wants_read(self) -> bool:
        return self.reading and self.in_flight_bytes < self._profile.buffer_bytes

    @property
    def finished(self) -> bool:
        return not self.reading and not self.queue

    def read(self, now: float) -> None:
        """Take one chunk, or the end, from the source. ``now`` in seconds of the monotonic clock."""
        try:
            data = self.source.recv(self._profile.chunk_bytes)
        except BlockingIOError:
            return
        except OSError:
            self.end(End.RESET, now)
            return
        if data:
            self.in_flight_bytes += len(data)
            self._admit(memoryview(data), len(data), now)
        else:
            self.end(End.EOF, now)

    def end(self, end: End, now: float) -> None:
        """Let nothing but ``end`` follow what is already on its way."""
        self.reading = False
        self._admit(end, 0, now)

    def discard(self) -> None:
        """The sink is gone: forget what was meant for it."""
        self.reading = False
        self.queue.clear()
        self.in_flight_bytes = 0

    def deliver(self, now: float, allowance: float) -> int:
        """Hand the sink what is due, at most ``allowance`` bytes; return how many bytes it took."""
        taken = 0
        while self.queue and self.queue[0][0] <= now and taken < allowance:
            due, item = self.queue.popleft()
            if item is End.RESET:
                raise ResetError
            if item is End.EOF:
                self.sink.shutdown(socket.SHUT_WR)
                continue
            try:
                sent = self.sink.send(item[: int(min(len(item), allowance - taken))])
            except BlockingIOError:
                sent = 0
            taken += sent
            self.in_flight_bytes -= sent
            if sent < len(item):
                self.queue.appendleft((due, item[sent:]))
                self.blocked = True
                break
        return taken

    def _admit(self, item: memoryview | End, size_bytes: int, now: float) -> None:
        self._link_free = max(now, self._link_free) + size_bytes / self._profile.bytes_per_s
        due = self._link_free + self._profile.rtt_s / 2
        if self._profile.jitter_ms:
            due += random.uniform(0, self._profile.jitter_ms / 1e3)
        self._last_due = max(due, self._last_due)  # jitter changes when, never the order
        self.queue.append((self._last_due, item))


class Connection:
    """A client, its upstream and the two ways between them."""

    def __init__(
        self, client: socket.socket, targets: list[Address], profile: WanProfile, now: float
    ) -> None:
        self.client = client
        self.connected = False
        self.closed = False
        self._untried = list(targets)
        self._allowance = math.inf if profile.drop_after is None else profile.drop_after
        self.upstream = self._dial()
        self.up = Way(profile, client, self.upstream, open_at=now + profile.rtt_s)
        self.down = Way(profile, self.upstream, client, open_at=now + 1.5 * profile.rtt_s)
        self.up.blocked = True

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that can be read: nothing comes down before the upstream has connected."""
        return (self.up, self.down) if self.connected else (self.up,)

    def on_writable(self, way: Way) -> None:
        """The sink of ``way`` takes bytes again, or the upstream's connect has come to its end."""
        if not self.connected:
            if self.upstream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.upstream.close()
                try:
                    self.upstream = self.up.sink = self.down.source = self._dial()
                except OSError:
                    self.reset()
                return
            self.connected = True
        way.blocked = False

    def deliver(self, now: float) -> None:
        """Hand over what is due in both directions, and close the connection when it has ended."""
        for way, opposite in ((self.up, self.down), (self.down, self.up)):
            if way.blocked:
                continue
            try:
                self._allowance -= way.deliver(now, self._allowance)
            except ResetError:
                return self.reset()
            except OSError:  # the sink is gone; the other side learns of it half a round trip later
                way.discard()
                opposite.end(End.RESET, now)
            if self._allowance <= 0:
                return self.reset()
        if self.up.finished and self.down.finished:
            self._close()
        return None

    def reset(self) -> None:
        """Close hard: with a linger time of zero the kernel sends a reset instead of an end of stream."""
        for end in (self.client, self.upstream):
            close_hard(end)
        self.closed = True

    def _close(self) -> None:
        self.client.close()
        self.upstream.close()
        self.closed = True

    def _dial(self) -> socket.socket:
        """Begin to connect to the first address not tried yet."""
        while self._untried:
            family, address = self._untried.pop(0)
            upstream = socket.socket(family, socket.SOCK_STREAM)
            if upstream.fileno() < FD_SETSIZE:
                upstream.setblocking(False)
                upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if upstream.connect_ex(address) in (0, errno.EINPROGRESS):
                    return upstream
            upstream.close()
        raise ConnectionRefusedError


def close_hard(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
