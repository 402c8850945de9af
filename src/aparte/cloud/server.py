"""The server: WebSocket sessions around one engine.

One task per connection reads frames into a queue, another has them computed in order, in passes that
sessions share (:mod:`aparte.cloud.scheduler`). A forward pass runs on a single worker thread, so that the
event loop keeps answering pings and ``/health`` meanwhile.
Logs name sessions, sizes and error codes; never payloads, and headers only by field name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import itertools
import json
import logging
import ssl
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from aparte.cloud.batch import Job
from aparte.cloud.engine import Engine
from aparte.cloud.memory import RETRY_AFTER_S, CacheMemory, free_bytes
from aparte.cloud.refusals import BusyError, EvictedError, ExpiredError, code_of
from aparte.cloud.scheduler import Scheduler
from aparte.cloud.sessions import Computed, Session
from aparte.errors import AparteError, FrameError, MismatchError, UserError
from aparte.fingerprint import Fingerprint
from aparte.wire.frames import (
    PROTOCOL_VERSION,
    ErrorFrame,
    Frame,
    Hello,
    ResultFrame,
    StepFrame,
    Welcome,
    decode,
    encode,
)

log = logging.getLogger(__name__)

#: The WebSocket library's log would hold frames at its debug level and request headers, so the bearer
#: token, in its tracebacks of failed handshakes. It stays silent whatever the application configures.
_silent = logging.getLogger(f"{__name__}.websockets")
_silent.setLevel(logging.CRITICAL + 1)

#: Steps a session may have waiting; a device that sends more is made to wait by its own TCP window.
QUEUE_STEPS = 16
HELLO_TIMEOUT_S = 10.0


@dataclass
class Counters:
    """What the server did since it started."""

    sessions_opened: int = 0
    steps: int = 0
    stale_steps: int = 0
    errors: int = 0


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
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.engine = engine
        self.counters = Counters()
        self._token = token
        self._tls = tls
        self._numbers = itertools.count(1)
        self._guests = 0  # connections past the door, greeted or not
        self._sessions: dict[int, Session] = {}
        self._worker = worker or compute_thread()
        budget = engine.limits.kv_bytes
        self.memory = CacheMemory(free_bytes(engine.device) if budget is None else budget, engine.row_bytes)
        self.scheduler = Scheduler(engine, self._worker, self.memory)
        self._server: Server | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of key-value cache held by all sessions."""
        return self.memory.held

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (useful with port 0). Raises :class:`UserError` if it is taken."""
        try:
            self._server = await serve(
                self._serve_connection,
                host,
                port,
                ssl=self._tls,
                compression=None,
                max_size=self.engine.max_message_bytes,
                max_queue=2,  # the rest waits in the session's own queue, or in the kernel
                process_request=self._process_request,
                close_timeout=1,
                server_header=None,
                logger=_silent,
            )
        except OSError as error:
            raise UserError(
                f"Cannot listen on {host}:{port} ({error.strerror or error}). Choose another --port."
            ) from None
        return int(next(iter(self._server.sockets)).getsockname()[1])

    async def close(self) -> None:
        """End all sessions and stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self._worker.shutdown(wait=True)

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """The door: health checks pass, everything else needs the token; a full house turns away."""
        if request.path == "/health":
            body = json.dumps({"status": "ok", "sessions": self.session_count}).encode()
            headers = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            return Response(http.HTTPStatus.OK, "OK", headers, body)
        if self._token is not None:
            given = request.headers.get("Authorization", "")
            wanted = f"Bearer {self._token}"
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), wanted.encode()):
                self.counters.errors += 1
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "A valid token is needed.\n")
        if self._guests >= self.engine.limits.max_sessions:
            self.counters.errors += 1
            response = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "All sessions are taken.\n")
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        return None

    async def _serve_connection(self, connection: ServerConnection) -> None:
        number = next(self._numbers)
        self._guests += 1
        try:
            await self._host(connection, number)
        except ConnectionClosed:
            pass
        except AparteError as error:
            self.counters.errors += 1
            code = code_of(error)
            log.warning("session %d ended with error %s", number, code)
            await _refuse(connection, code, str(error))
        except Exception as error:
            # The type is all that may be logged: messages of other libraries can hold tensor values.
            self.counters.errors += 1
            log.error("session %d ended with an internal error: %s", number, type(error).__name__)
            await _refuse(connection, "internal", "The server failed while computing this step.")
        finally:
            self._guests -= 1

    async def _host(self, connection: ServerConnection, number: int) -> None:
        """One session from greeting to end. Its cache is free when this returns or raises."""
        if self._guests > self.engine.limits.max_sessions:  # several came through the door at once
            raise BusyError("All sessions are taken.")
        session = await self._greet(connection)
        self.memory.add(session)
        self._sessions[number] = session
        self.counters.sessions_opened += 1
        log.info("session %d opened", number)
        try:
            await connection.send(self._welcome())
            await self._run_session(connection, session)
        finally:
            del self._sessions[number]
            session.close()
            self.memory.remove(session)
            log.info("session %d closed", number)

    async def _greet(self, connection: ServerConnection) -> Session:
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
        self.engine.fingerprint.check(Fingerprint.from_json(frame.fingerprint))
        return self.engine.open(frame.wire)

    def _welcome(self) -> bytes:
        return encode(
            Welcome(
                self.engine.fingerprint.to_json(),
                max_nodes=self.engine.limits.max_nodes_per_step,
                max_context=self.engine.max_context,
                dtype=self.engine.dtype,
            )
        )

    async def _run_session(self, connection: ServerConnection, session: Session) -> None:
        queue: asyncio.Queue[_Queued | Exception] = asyncio.Queue(QUEUE_STEPS)
        session.on_evict = lambda: queue.put_nowait(EvictedError())
        reader = asyncio.create_task(_read_steps(connection, session, queue))
        try:
            while True:
                item = await self._next(queue)
                if isinstance(item, Exception):
                    raise item
                computed = await self.scheduler.compute(Job(session, item.frame.step, item.frame.payload))
                session.unanswered -= 1
                if computed is None:
                    self.counters.stale_steps += 1
                    continue
                self.counters.steps += 1
                await connection.send(_result(item, computed))
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _next(self, queue: asyncio.Queue[_Queued | Exception]) -> _Queued | Exception:
        """The next step, or what ended the session. Waiting here is the only idle time there is."""
        try:
            return await asyncio.wait_for(queue.get(), self.engine.limits.idle_s)
        except asyncio.TimeoutError:
            return ExpiredError("The session was idle for too long.")


@dataclass(frozen=True)
class _Queued:
    """A step that waits for the forward pass, and when it came."""

    frame: StepFrame
    arrived: float


async def _read_steps(
    connection: ServerConnection, session: Session, queue: asyncio.Queue[_Queued | Exception]
) -> None:
    """Move steps from the socket to the queue; whatever ends that goes into the queue too."""
    try:
        while True:
            message = await connection.recv(decode=False)
            arrived = time.perf_counter()
            frame: Frame = decode(message)
            if not isinstance(frame, StepFrame):
                raise FrameError("A message after the greeting is not a step.")
            session.check(frame.step, frame.payload)
            session.epoch = max(session.epoch, frame.step.epoch)
            session.unanswered += 1
            session.last_used = time.monotonic()
            await queue.put(_Queued(frame, arrived))
    except Exception as error:  # of any kind: a session whose reader is gone would wait for ever
        session.abandoned = isinstance(error, ConnectionClosed)
        await queue.put(error)


def _result(item: _Queued, computed: Computed) -> bytes:
    spent_ms = (time.perf_counter() - item.arrived) * 1e3
    queue_ms = max(0.0, spent_ms - computed.compute_ms)
    return encode(ResultFrame(item.frame.step.number, computed.compute_ms, queue_ms, computed.payload))


async def _refuse(connection: ServerConnection, code: str, message: str) -> None:
    """Tell the device why, then close; it may be gone already."""
    with contextlib.suppress(ConnectionClosed):
        await connection.send(encode(ErrorFrame(code, message[:1000])))
        # What the device has sent meanwhile lies in front of its goodbye and has to be read away.
        await asyncio.gather(connection.close(1008, code), _discard(connection))


async def _discard(connection: ServerConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await connection.recv(decode=False)
