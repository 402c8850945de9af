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
import errno
import math
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from aparte.address import format_address
from aparte.errors import UserError
from aparte.measure.wan_link import FD_SETSIZE, Address, Connection, WanProfile, Way, close_hard

_MAX_CONNECTIONS = 400  # two descriptors each; more wait in the kernel's backlog
_ACCEPT_PAUSE_S = 0.2  # after running out of descriptors
_SPIN_S = 60e-6  # a sleep ends about this much late; with real-time priority the rest is polled


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
        self._connections: list[Connection] = []
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
        reads: dict[socket.socket, Way | None] = {self._wake_read: None}
        writes: dict[socket.socket, tuple[Connection, Way]] = {}
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
            if client.fileno() >= FD_SETSIZE:
                raise OSError(errno.EMFILE, "too many descriptors for select")
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(Connection(client, self._targets, self.profile, now))
        except OSError:
            close_hard(client)

    def _close(self) -> None:
        for connection in self._connections:
            connection.reset()
        self._connections.clear()
        for end in (self._listener, self._wake_read, self._wake_write):
            end.close()


def _resolve(to: tuple[str, int]) -> list[Address]:
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
