"""The server: WebSocket sessions around one engine.

One task per connection reads frames into a queue, another has them computed in order, in passes that
sessions share (:mod:`aparte.cloud.scheduler`). A forward pass runs on a single worker thread, so that the
event loop keeps answering pings and ``/health`` meanwhile.
Logs (:mod:`aparte.cloud.journal`) and counts (:mod:`aparte.cloud.telemetry`) hold numbers and codes only.
"""

from __future__ import annotations

import asyncio
import functools
import http
import itertools
import logging
import math
import ssl
import weakref
from concurrent.futures import Executor, ThreadPoolExecutor

from websockets.asyncio.server import Server, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from aparte import __version__
from aparte.cloud import pages
from aparte.cloud.allowance import Allowances, ShareError
from aparte.cloud.batch import Job
from aparte.cloud.connection import Connection
from aparte.cloud.conversation import (
    QUEUE_STEPS,
    Queued,
    dismiss,
    queued_ms,
    read_steps,
    refuse,
    result_of,
)
from aparte.cloud.engine import Engine
from aparte.cloud.journal import Visit, write
from aparte.cloud.keys import Keyring, Owner
from aparte.cloud.memory import RETRY_AFTER_S, CacheMemory, free_bytes
from aparte.cloud.parking import Parking, Seat, was_lost
from aparte.cloud.refusals import BusyError, EvictedError, ExpiredError, code_of
from aparte.cloud.scheduler import Scheduler
from aparte.cloud.sessions import Session
from aparte.cloud.telemetry import Counters, Level, Telemetry
from aparte.errors import AparteError, DoorError, FrameError, MismatchError, UserError
from aparte.fingerprint import Fingerprint
from aparte.wire.frames import (
    PROTOCOL_VERSION,
    Hello,
    Welcome,
    decode,
    encode,
)

#: The WebSocket library's log would hold frames at its debug level and request headers, so the bearer
#: token, in its tracebacks of failed handshakes. It stays silent whatever the application configures.
_silent = logging.getLogger(f"{__name__}.websockets")
_silent.setLevel(logging.CRITICAL + 1)

HELLO_TIMEOUT_S = 10.0
#: How often the token file is looked at.
KEYS_INTERVAL_S = 1.0
_REVOKED = "This token was revoked. Ask whoever runs the server for another one."


def compute_thread() -> Executor:
    """The thread that loads and computes."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="middle")


class MiddleServer:
    """Serves an engine on a host and port until closed.

    ``worker`` is the one thread that computes, best the one that loaded the engine: OpenMP keeps a team
    of threads for every thread that ever computed, and with two teams on few cores its threads stop
    spinning between operations, which doubled the time of a step on two cores.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        worker: Executor | None = None,
        token: str | None = None,
        keys: Keyring | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``keys`` are the tokens that open the door, or ``token`` is the only one; else it is open."""
        self.engine = engine
        about = {
            "version": __version__,
            "model": engine.fingerprint.name,
            "cut": engine.fingerprint.cut,
            "dtype": engine.dtype,
        }
        self.telemetry = Telemetry(about, self._level)
        self._keys = Keyring.of(token) if token is not None else keys
        #: Whose token a connection came with.
        self._owners: weakref.WeakKeyDictionary[Connection, Owner] = weakref.WeakKeyDictionary()
        self.allowances = Allowances(self._keys)
        self._chores: tuple[asyncio.Task[None], ...] = ()
        self._tls = tls
        self._numbers = itertools.count(1)
        self._guests = 0  # connections past the door, greeted or not
        self._sessions: dict[int, Session] = {}
        self._worker = worker or compute_thread()
        budget = engine.limits.kv_bytes
        self.memory = CacheMemory(
            free_bytes(engine.device) if budget is None else budget,
            engine.row_bytes,
            session_budget=engine.limits.session_kv_bytes,
            share_of=self.allowances.memory_of,
        )
        engine.slab = self.memory.slab
        self.scheduler = Scheduler(engine, self._worker, self.memory, self.telemetry.passed)
        self.parking = Parking(engine.limits.grace_s, engine.limits.max_sessions, self._free)
        self._server: Server | None = None

    @property
    def counters(self) -> Counters:
        return self.telemetry.counters

    @property
    def cache_bytes(self) -> int:
        """Bytes of key-value cache held by all sessions, parked ones included."""
        return self.memory.held

    @property
    def session_count(self) -> int:
        """Sessions with a connection."""
        return len(self._sessions)

    @property
    def steps_in_hand(self) -> int:
        """Steps that came and are not answered yet."""
        return sum(max(0, session.unanswered) for session in tuple(self._sessions.values()))

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (useful with port 0). Raises :class:`UserError` if it is taken."""
        try:
            self._server = await serve(
                self.serve_connection,
                host,
                port,
                ssl=self._tls,
                compression=None,
                max_size=self.engine.max_message_bytes,
                max_queue=2,  # the rest waits in the session's own queue, or in the kernel
                process_request=self.process_request,
                close_timeout=1,
                server_header=None,
                logger=_silent,
            )
        except OSError as error:
            raise UserError(
                f"Cannot listen on {host}:{port} ({error.strerror or error}). Choose another --port."
            ) from None
        self.open()
        return int(next(iter(self._server.sockets)).getsockname()[1])

    def open(self) -> None:
        """Begin to watch tokens and memory; for whoever brings connections without :meth:`start`."""
        if not self._chores:
            self._chores = tuple(map(asyncio.create_task, (self._watch_keys(), self.memory.tidy())))

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for chore in self._chores:
            chore.cancel()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self.parking.close()
        self._worker.shutdown(wait=True)
        self.memory.slab.trim()

    def process_request(self, connection: Connection, request: Request) -> Response | None:
        """The door: health checks pass, everything else needs the token; a full house turns away."""
        if request.path == "/health":
            return pages.health(self.session_count)
        if self._keys is not None:
            kind, _, token = request.headers.get("Authorization", "").partition(" ")
            owner = self._keys.owner_of(token)
            if owner is None or kind != "Bearer":
                self.telemetry.refused("denied")
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "A valid token is needed.\n")
            self._owners[connection] = owner
        peer, has_token = str((connection.remote_address or ("",))[0]), self._keys is not None
        if page := pages.page(request.path, self.telemetry, peer=peer, has_token=has_token):
            return page
        try:
            if (owner := self._owners.get(connection)) is not None:
                self.allowances.check_connection(owner)
        except ShareError as error:
            self.telemetry.refused(code_of(error))
            response = connection.respond(http.HTTPStatus.TOO_MANY_REQUESTS, f"{error}\n")
            response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
            return response
        if self._guests >= self.engine.limits.max_sessions:
            self.telemetry.refused("busy")
            response = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "All sessions are taken.\n")
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        return None

    async def _watch_keys(self) -> None:
        """Send away those whose tokens are revoked."""
        while self._keys is not None:
            await asyncio.sleep(KEYS_INTERVAL_S)
            try:
                if not self._keys.refresh():
                    continue
            except UserError:
                # It is missing or damaged; the tokens read last stay valid.
                write(logging.WARNING, "tokens_unreadable")
                continue
            owners = self._keys.owners
            self.allowances.forget_all_but(owners)
            self.parking.end_all_but(owners)
            await asyncio.gather(
                *(
                    dismiss(connection, "denied", _REVOKED)
                    for connection, owner in tuple(self._owners.items())
                    if owner not in owners and connection.state is State.OPEN
                ),
                return_exceptions=True,
            )

    async def serve_connection(self, connection: Connection) -> None:
        """One connection that was let in, to its end."""
        number = next(self._numbers)
        owner = self._owners.get(connection)
        self._guests += 1
        self.allowances.arrive(owner)
        try:
            await self._host(connection, number)
        except ConnectionClosed:
            pass
        except AparteError as error:
            code = code_of(error)
            self.telemetry.failed(number, code)
            await refuse(connection, code, str(error), getattr(error, "retry_after_s", 0.0))
        except Exception as error:
            # The type is all that may be logged: messages of other libraries can hold tensor values.
            self.telemetry.failed(number, "internal", type(error).__name__)
            await refuse(connection, "internal", "The server failed while computing this step.")
        finally:
            self._guests -= 1
            self.allowances.leave(owner)

    async def _host(self, connection: Connection, number: int) -> None:
        """One connection from greeting to end.

        When this returns or raises, its session is over and the cache free, or parked, or another
        connection's.
        """
        if self._guests > self.engine.limits.max_sessions:  # several came through the door at once
            raise BusyError("All sessions are taken.")
        hello = await self._greet(connection)
        owner = self._owners.get(connection)
        if self._keys is not None and owner not in self._keys.owners:
            raise DoorError(_REVOKED)
        seat = self.parking.find(hello.resume, hello.wire, owner)
        resumed = seat is not None
        try:
            self.allowances.check_session(owner, self._sessions_of(owner, seat))
        except ShareError:
            if seat is not None and seat.is_free:
                self.parking.park(seat)  # again
            raise
        seat = seat or self._new_seat(hello, owner)
        seat.take(connection)
        self._sessions[number] = seat.session
        self.counters.sessions_resumed += resumed
        visit = Visit(number, owner.name if owner else None)
        visit.began(resumed=resumed)
        lost = False
        try:
            await connection.send(self._welcome(seat, resumed=resumed))
            async with seat.busy:
                if seat.is_held_by(connection):
                    await self._run_session(connection, seat.session, owner, visit)
        except ConnectionClosed as error:
            lost = was_lost(error)
            raise
        finally:
            del self._sessions[number]
            if seat.is_held_by(connection):
                (self.parking.park if lost else self.parking.end)(seat)
            visit.ended(parked=lost and not seat.session.closed)

    async def _greet(self, connection: Connection) -> Hello:
        try:
            message = await asyncio.wait_for(connection.recv(decode=False), HELLO_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise FrameError(f"No greeting came within {HELLO_TIMEOUT_S:.0f} s.") from None
        frame = decode(message)
        if not isinstance(frame, Hello):
            raise FrameError("The first message is not a greeting.")
        if frame.version != PROTOCOL_VERSION:
            raise MismatchError(
                f"This server speaks protocol {PROTOCOL_VERSION}, the device {frame.version}. "
                "Install the same version of aparte on both."
            )
        self.engine.check(Fingerprint.from_json(frame.fingerprint))
        return frame

    def _sessions_of(self, owner: Owner | None, but: Seat | None) -> int:
        """How many sessions of this token have a connection, besides the one in the seat ``but``."""
        own = {session for session in self._sessions.values() if owner and session.holder == owner.name}
        return len(own - {but.session} if but else own)

    def _new_seat(self, hello: Hello, owner: Owner | None) -> Seat:
        session = self.engine.open(hello.wire, Fingerprint.from_json(hello.fingerprint).cut)
        session.holder = owner.name if owner else None
        self.memory.add(session)
        self.counters.sessions_opened += 1
        return self.parking.add(session, hello.wire, owner, resumable=hello.resume is not None)

    def _free(self, session: Session) -> None:
        session.close()
        self.memory.remove(session)

    def _welcome(self, seat: Seat, *, resumed: bool) -> bytes:
        return encode(
            Welcome(
                self.engine.served(seat.session).to_json(),
                max_nodes=self.engine.limits.max_nodes_per_step,
                max_context=self.engine.max_context,
                dtype=self.engine.dtype,
                resume=seat.name,
                resumed=resumed,
            )
        )

    async def _run_session(
        self, connection: Connection, session: Session, owner: Owner | None, visit: Visit
    ) -> None:
        if session.closed:  # others needed the memory before it could go on
            raise EvictedError
        queue: asyncio.Queue[Queued | Exception] = asyncio.Queue(QUEUE_STEPS)
        session.abandoned, session.unanswered = False, 0
        session.on_evict = lambda: queue.put_nowait(EvictedError())
        note = functools.partial(self.telemetry.arrived, session, visit)
        reader = asyncio.create_task(read_steps(connection, session, queue, note))
        try:
            while True:
                item = await self._next(queue)
                if isinstance(item, Exception):
                    raise item
                if wait_s := self.allowances.check_step(owner):
                    await asyncio.wait([reader], timeout=wait_s)  # no longer than the device is there
                self.allowances.use(owner, tokens=len(item.frame.step), num_bytes=item.num_bytes)
                computed = await self.scheduler.compute(Job(session, item.frame.step, item.frame.payload))
                session.unanswered -= 1
                if computed is None:
                    self.telemetry.dropped(visit)
                    continue
                queue_ms = queued_ms(item, computed)
                answer = result_of(item, computed, queue_ms)
                self.telemetry.answered(visit, queue_ms, len(answer))
                self.allowances.use(owner, num_bytes=len(answer))
                await connection.send(answer)
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _next(self, queue: asyncio.Queue[Queued | Exception]) -> Queued | Exception:
        """The next step, or what ended the session. Waiting here is the only idle time there is."""
        try:
            return await asyncio.wait_for(queue.get(), self.engine.limits.idle_s)
        except asyncio.TimeoutError:
            return ExpiredError("The session was idle for too long.")

    def _level(self) -> Level:
        return Level(
            connected=self.session_count,
            parked=len(self.parking),
            most_sessions=self.engine.limits.max_sessions,
            waiting_steps=self.scheduler.waiting,
            kv_bytes=self.cache_bytes,
            kv_idle_bytes=self.memory.slab.idle,
            kv_peak_bytes=self.memory.slab.peak,
            kv_budget_bytes=self.memory.budget,
            evicted=self.memory.evicted,
        )
