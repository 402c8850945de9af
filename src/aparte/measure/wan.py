"""A WAN emulator: a TCP relay that delays each direction by half the round trip.

The delay is not serialised. Every chunk gets its own time of arrival, so any number of chunks are on
their way at once and a steady stream keeps its full throughput. Per connection and direction, a chunk
read at time ``t`` departs at ``max(t, link free) + bits / bandwidth`` and arrives ``rtt / 2``, plus
jitter, after that; bytes never overtake each other.

What it emulates:

- The connect. The kernel accepts on loopback at once, while a real WAN takes one round trip. The relay
  therefore holds the client's first bytes back by one additional round trip, and whatever the server
  says first by one and a half: each then arrives as long after the client's ``connect`` was called
  as over a real link. Only the client's own ``connect`` returns early.
- Back-pressure. The relay stops reading when more than :attr:`WanProfile.buffer_bytes` wait in it, and
  TCP then slows the sender down.
- End of stream and reset, which travel behind the data like everything else. An upstream that refuses
  the connection is the exception: the client is reset at once.

What it does not: slow start, loss and retransmission, header bytes, and links shared by several
connections (each connection has a link of its own). Transfers shorter than a few round trips are hence
faster here than over a cold connection of a real WAN.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import math
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aparte.errors import AparteError, UserError

LOOPBACK = "127.0.0.1"

_FD_SETSIZE = 1024  # select() knows no descriptor at or above this
_MAX_CONNECTIONS = 400  # two descriptors each; more wait in the kernel's backlog
_ACCEPT_PAUSE_S = 0.2  # after running out of descriptors
_SPIN_S = 60e-6  # a sleep ends about this much late; with real-time priority the rest is polled
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


_Target = tuple[int, Any]  # address family, address as the socket module wants it


class _End(enum.Enum):
    """How a direction ends."""

    EOF = enum.auto()
    RESET = enum.auto()


class _ResetError(Exception):
    """The connection is to be reset on both sides now."""


class _Way:
    """One direction of a connection: what was read from ``source`` and has not reached ``sink`` yet."""

    def __init__(
        self, profile: WanProfile, source: socket.socket, sink: socket.socket, open_at: float
    ) -> None:
        self.source = source
        self.sink = sink
        self.queue: deque[tuple[float, memoryview | _End]] = deque()
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
            self.end(_End.RESET, now)
            return
        if data:
            self.in_flight_bytes += len(data)
            self._admit(memoryview(data), len(data), now)
        else:
            self.end(_End.EOF, now)

    def end(self, end: _End, now: float) -> None:
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
            if item is _End.RESET:
                raise _ResetError
            if item is _End.EOF:
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

    def _admit(self, item: memoryview | _End, size_bytes: int, now: float) -> None:
        self._link_free = max(now, self._link_free) + size_bytes / self._profile.bytes_per_s
        due = self._link_free + self._profile.rtt_s / 2
        if self._profile.jitter_ms:
            due += random.uniform(0, self._profile.jitter_ms / 1e3)
        self._last_due = max(due, self._last_due)  # jitter changes when, never the order
        self.queue.append((self._last_due, item))


class _Connection:
    """A client, its upstream and the two ways between them."""

    def __init__(
        self, client: socket.socket, targets: list[_Target], profile: WanProfile, now: float
    ) -> None:
        self.client = client
        self.connected = False
        self.closed = False
        self._untried = list(targets)
        self._allowance = math.inf if profile.drop_after is None else profile.drop_after
        self.upstream = self._dial()
        self.up = _Way(profile, client, self.upstream, open_at=now + profile.rtt_s)
        self.down = _Way(profile, self.upstream, client, open_at=now + 1.5 * profile.rtt_s)
        self.up.blocked = True

    @property
    def ways(self) -> tuple[_Way, ...]:
        """The ways that can be read: nothing comes down before the upstream has connected."""
        return (self.up, self.down) if self.connected else (self.up,)

    def on_writable(self, way: _Way) -> None:
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
            except _ResetError:
                return self.reset()
            except OSError:  # the sink is gone; the other side learns of it half a round trip later
                way.discard()
                opposite.end(_End.RESET, now)
            if self._allowance <= 0:
                return self.reset()
        if self.up.finished and self.down.finished:
            self._close()
        return None

    def reset(self) -> None:
        """Close hard: with a linger time of zero the kernel sends a reset instead of an end of stream."""
        for end in (self.client, self.upstream):
            _close_hard(end)
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
            if upstream.fileno() < _FD_SETSIZE:
                upstream.setblocking(False)
                upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if upstream.connect_ex(address) in (0, errno.EINPROGRESS):
                    return upstream
            upstream.close()
        raise ConnectionRefusedError


class WanRelay:
    """Listens on ``listen`` and relays every connection to ``to`` over an emulated link.

    Binds on construction; port 0 picks a free one, see :attr:`port`. Either call :meth:`serve_forever`
    and, from another thread or a signal handler, :meth:`stop`; or use it as a context manager, which
    serves from a daemon thread. It serves once.
    """

    def __init__(self, listen: tuple[str, int], to: tuple[str, int], profile: WanProfile) -> None:
        self.profile = profile
        self._targets = _resolve(to)
        self._listener = _listen(listen)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._connections: list[_Connection] = []
        self._accept_from = 0.0
        self._stopping = False
        self._realtime = False
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.address[1]

    @property
    def is_realtime(self) -> bool:
        """Whether it serves with real-time priority, so that other work on the machine cannot delay it."""
        return self._realtime

    def serve_forever(self, *, realtime: bool = False) -> None:
        """Relay until :meth:`stop`, then reset what is still open.

        With ``realtime`` the calling thread asks for real-time priority while it serves. Where that is
        not allowed it goes on without; deliveries may then be some milliseconds late on a busy machine.
        """
        with _realtime_priority() if realtime else contextlib.nullcontext(False) as self._realtime:
            try:
                while not self._stopping:
                    self._turn()
            finally:
                self._close()

    def stop(self) -> None:
        """Make :meth:`serve_forever` return soon. Safe from other threads and signal handlers."""
        self._stopping = True
        with contextlib.suppress(OSError):  # already closed, or already woken often enough
            self._wake_write.send(b"!")

    def __enter__(self) -> WanRelay:
        self._thread = threading.Thread(target=self.serve_forever, name="wan-relay", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _turn(self) -> None:
        """Wait for the next event or delivery, read what came, deliver what is due."""
        now = time.monotonic()
        due = math.inf
        reads: dict[socket.socket, _Way | None] = {self._wake_read: None}
        writes: dict[socket.socket, tuple[_Connection, _Way]] = {}
        if len(self._connections) < _MAX_CONNECTIONS:
            if now >= self._accept_from:
                reads[self._listener] = None
            else:
                due = self._accept_from
        for connection in self._connections:
            for way in connection.ways:
                if way.wants_read:
                    reads[way.source] = way
                if way.blocked:
                    writes[way.sink] = connection, way
                elif way.queue:
                    due = min(due, way.queue[0][0])

        readable, writable, _ = select.select(reads, writes, (), self._timeout_s(due - now))
        now = time.monotonic()
        for source in readable:
            if source is self._listener:
                self._accept(now)
            elif way_read := reads[source]:
                way_read.read(now)
        for sink in writable:
            connection, way = writes[sink]
            connection.on_writable(way)
        for connection in self._connections:
            if not connection.closed:
                connection.deliver(now)
        self._connections = [connection for connection in self._connections if not connection.closed]

    def _timeout_s(self, wait_s: float) -> float | None:
        if wait_s == math.inf:
            return None
        if self._realtime:  # nothing else gets a late start from this: the spin is a fraction of a tick
            wait_s -= _SPIN_S
        return max(0.0, wait_s)

    def _accept(self, now: float) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: the listener stays readable, so look away for a while
            self._accept_from = now + _ACCEPT_PAUSE_S
            return
        try:
            if client.fileno() >= _FD_SETSIZE:
                raise OSError(errno.EMFILE, "too many descriptors for select")
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(_Connection(client, self._targets, self.profile, now))
        except OSError:
            _close_hard(client)

    def _close(self) -> None:
        for connection in self._connections:
            connection.reset()
        self._connections.clear()
        for end in (self._listener, self._wake_read, self._wake_write):
            end.close()


@contextlib.contextmanager
def wan_process(
    to: tuple[str, int], profile: WanProfile, *, start_timeout_s: float = 30
) -> Iterator[tuple[str, int]]:
    """Run ``aparte wan`` in front of ``to`` as a child process; gives the host and port to connect to.

    A process of its own keeps the relay's timing clear of this process's interpreter lock. It ends
    with the block, and by itself should this process die.
    """
    command = [sys.executable, "-m", "aparte", "wan", "--json", "--listen", "0", "--to", format_address(to)]
    command += ["--exit-with-parent", str(os.getpid()), "--rtt", str(profile.rtt_ms)]
    command += ["--jitter", str(profile.jitter_ms)]
    if profile.mbps is not None:
        command += ["--mbps", str(profile.mbps)]
    if profile.drop_after is not None:
        command += ["--drop-after", str(profile.drop_after)]
    # A session of its own: Ctrl-C is for the parent, which ends the child when it is done with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            yield _read_address(child, start_timeout_s)
        finally:
            child.terminate()
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()


def _read_address(child: subprocess.Popen[str], timeout_s: float) -> tuple[str, int]:
    """The address in the one JSON line that ``aparte wan --json`` prints when it is ready."""
    assert child.stdout is not None
    assert child.stderr is not None
    ready, _, _ = select.select([child.stdout], [], [], timeout_s)
    if not ready:
        raise AparteError(
            f"The WAN emulator did not start within {timeout_s:g} s; is the machine overloaded?"
        )
    line = child.stdout.readline()
    if not line:
        reason = child.stderr.read().strip().splitlines() or ["it ended without a word"]
        raise AparteError(f"The WAN emulator did not start: {reason[-1]}")
    return parse_address(json.loads(line)["listening"])


def parse_address(text: str, default_host: str = LOOPBACK) -> tuple[str, int]:
    """Read ``PORT``, ``HOST:PORT`` or ``[IPV6]:PORT``."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UserError(f"{text!r} is not an address; give HOST:PORT, for example {LOOPBACK}:8765.")
    return host.removeprefix("[").removesuffix("]") or default_host, int(port)


def format_address(address: tuple[str, int]) -> str:
    """Write an address so that :func:`parse_address` reads it back."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(to: tuple[str, int]) -> list[_Target]:
    """All addresses of ``to``, to be tried in turn: ``localhost`` often has two, with one in use."""
    try:
        found = socket.getaddrinfo(*to, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UserError(
            f"The host {to[0]!r} of --to is unknown here; check the spelling or give its IP address."
        ) from None
    return [(family, address) for family, _, _, _, address in found]


def _listen(address: tuple[str, int]) -> socket.socket:
    """A non-blocking listener on ``address``."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, local = found[0]
        listener = socket.create_server((str(local[0]), int(local[1])), family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        where = format_address(address)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            message = f"Port {address[1]} is in use already; choose another, or 0 for any free one."
        elif isinstance(error, OSError) and error.errno == errno.EACCES:
            message = f"Listening on {where} is not permitted; choose a port above 1023."
        else:
            message = f"Listening on {where} is not possible; give an address of this machine."
        raise UserError(message) from None
    listener.setblocking(False)
    return listener


def _close_hard(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


@contextlib.contextmanager
def _realtime_priority() -> Iterator[bool]:
    """Give the calling thread the lowest real-time priority, if allowed; says whether it was."""
    try:
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
    except (AttributeError, OSError):  # not this system, or not this user
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)
