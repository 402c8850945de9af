"""Sessions that outlive their connection: who holds one, and how long one waits for its device.

A session has a name that only its device knows. When the connection is lost, without a goodbye, the
session is *parked*: its cache stays for a grace time, or until others need the memory. A new connection that
gives the name goes on with it. It may come before anybody has noticed that the old one is gone, and takes
over then.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Collection

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from aparte.cloud.connection import Connection
from aparte.cloud.keys import Owner
from aparte.cloud.sessions import Session


class Seat:
    """A session, and the connection that it belongs to at the moment."""

    def __init__(self, session: Session, wire: str, owner: Owner | None, *, resumable: bool) -> None:
        """``wire`` is the number format it was opened with, ``owner`` whose token came with it."""
        self.session = session
        self.wire = wire
        self.owner = owner
        #: Tells this session from all others; empty if it ends with its connection.
        self.name = secrets.token_urlsafe(24) if resumable else ""
        #: Held while a connection's steps are computed: a pass of a lost one may still be under way.
        self.busy = asyncio.Lock()
        self._holder: Connection | None = None

    def take(self, connection: Connection) -> None:
        """``connection`` holds the session from now on. One that held it before is cut off."""
        before, self._holder = self._holder, connection
        if before is not None:
            before.transport.abort()
        self.session.on_evict = lambda: None

    def is_held_by(self, connection: Connection) -> bool:
        return self._holder is connection

    @property
    def is_free(self) -> bool:
        """Whether nobody holds it."""
        return self._holder is None

    def leave(self) -> None:
        """Nobody holds it."""
        self._holder = None


class Parking:
    """Every session that may be gone on with; those that nobody holds, for ``grace_s`` seconds at most."""

    def __init__(self, grace_s: float, most: int, free: Callable[[Session], None]) -> None:
        """``free`` ends a session. At most ``most`` of them are parked at a time."""
        self._grace_s = grace_s
        self._most = most
        self._free = free
        # By a hash of the name: how long a look-up takes says nothing about names.
        self._seats: dict[bytes, Seat] = {}
        self._parked: dict[Seat, asyncio.TimerHandle] = {}  # the longest parked first

    def __len__(self) -> int:
        """Sessions parked."""
        return len(self._parked)

    def add(self, session: Session, wire: str, owner: Owner | None, *, resumable: bool) -> Seat:
        """A place for a new session."""
        seat = Seat(session, wire, owner, resumable=resumable and self._grace_s > 0)
        if seat.name:
            self._seats[_digest(seat.name)] = seat
        return seat

    def find(self, name: str | None, wire: str, owner: Owner | None) -> Seat | None:
        """The session of that name, if it is the same owner's and speaks the same number format."""
        seat = self._seats.get(_digest(name)) if name else None
        if seat is None or seat.wire != wire or seat.owner != owner or seat.session.closed:
            return None
        if timer := self._parked.pop(seat, None):
            timer.cancel()
        return seat

    def park(self, seat: Seat) -> None:
        """The connection is lost. Its device may come back."""
        session = seat.session
        if not seat.name or session.closed:
            self.end(seat)
            return
        seat.leave()
        session.unanswered = 0  # nobody waits for what was not answered
        session.last_used = time.monotonic()
        session.on_evict = lambda: self.end(seat)
        self._parked[seat] = asyncio.get_running_loop().call_later(self._grace_s, self.end, seat)
        if len(self._parked) > self._most:
            self.end(next(iter(self._parked)))

    def end(self, seat: Seat) -> None:
        """The session is over; its memory is free."""
        if timer := self._parked.pop(seat, None):
            timer.cancel()
        if seat.name:
            self._seats.pop(_digest(seat.name), None)
        self._free(seat.session)

    def end_all_but(self, owners: Collection[Owner | None]) -> None:
        """End what is parked of others than these."""
        for seat in tuple(self._parked):
            if seat.owner not in owners:
                self.end(seat)

    def close(self) -> None:
        """End all that are parked."""
        for seat in tuple(self._parked):
            self.end(seat)


def was_lost(error: ConnectionClosed) -> bool:
    """Whether a connection ended without anybody's will: torn, or silent for too long."""
    codes = {close.code for close in (error.rcvd, error.sent) if close is not None}
    return codes <= {CloseCode.INTERNAL_ERROR}  # what a ping that is not answered ends with


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogatepass")).digest()  # JSON can hold half a character
