"""The server behind somebody else's WebSocket, such as the proxy of Ray Serve: an ASGI application.

It only translates. Who is let in, what a session may do and how it ends is decided by
:class:`~aparte.cloud.server.MiddleServer`, as for a socket of its own. What differs:

- Whoever speaks WebSocket has read a message before it comes here, so one that is larger than announced is
  refused after it was read, not before.
- A proxy may read on and on, whatever is taken from it, so that a device that sends too much is not held up
  by its own TCP window. It is sent away when more is unread than an honest device has under way.
- A connection that was lost, and one that was closed without a code, look alike: both are parked.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK
from websockets.frames import Close, CloseCode
from websockets.http11 import Request, Response
from websockets.protocol import State

from aparte.cloud.conversation import QUEUE_STEPS
from aparte.cloud.server import MiddleServer
from aparte.wire.frames import ErrorFrame, encode

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

#: Messages that may lie here unread, beside those in the session's own queue; of the largest, fewer.
MOST_UNREAD = 4 * QUEUE_STEPS
MOST_UNREAD_FULL = 4
#: Codes by which ASGI servers mean that nobody said goodbye.
_LOST = (CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE)
#: The extension by which a WebSocket can be turned away with a proper HTTP answer.
_ANSWER = "websocket.http.response"


class AsgiApp:
    """``server`` as an ASGI application. Serves no port; whoever calls it does."""

    def __init__(self, server: MiddleServer) -> None:
        self._server = server

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        self._server.open()
        connection = AsgiConnection(scope, receive, send, self._server.engine.max_message_bytes)
        if scope["type"] == "http":
            await _answer(send, "http", self._page(connection, scope))
            return
        await receive()  # "websocket.connect", always
        if response := self._server.process_request(connection, _request_of(scope)):
            if _ANSWER in scope.get("extensions", {}):
                await _answer(send, _ANSWER.removesuffix(".response"), response)
            else:
                await send({"type": "websocket.close", "code": CloseCode.POLICY_VIOLATION})
            return
        await connection.accept()
        reader = asyncio.create_task(connection.pump())
        try:
            await self._server.serve_connection(connection)
        finally:
            await connection.close(CloseCode.GOING_AWAY)
            reader.cancel()
            await asyncio.wait([reader])

    def _page(self, connection: AsgiConnection, scope: Event) -> Response:
        if scope["method"] != "GET":
            return connection.respond(http.HTTPStatus.METHOD_NOT_ALLOWED, "There is nothing here but GET.\n")
        response = self._server.process_request(connection, _request_of(scope))
        return response or connection.respond(
            http.HTTPStatus.UPGRADE_REQUIRED, "This is a WebSocket server, for aparte on a device.\n"
        )


class AsgiConnection:
    """One connection as ``websockets`` would show it; also its own ``transport``."""

    def __init__(self, scope: Event, receive: Receive, send: Send, max_bytes: int) -> None:
        """``max_bytes`` is the size of the largest message."""
        self.remote_address = scope.get("client")
        self.state = State.CONNECTING
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._end: tuple[Close | None, Close | None] | None = None  # what was received and what was sent
        self._farewell: asyncio.Task[None] | None = None

    @property
    def transport(self) -> AsgiConnection:
        return self

    def respond(self, status: http.HTTPStatus, text: str) -> Response:
        body = text.encode()
        headers = Headers([("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return Response(status.value, status.phrase, headers, body)

    async def accept(self) -> None:
        await self._send({"type": "websocket.accept"})
        self.state = State.OPEN

    async def pump(self) -> None:
        """Take messages as they come, until the connection ends or the device sends too much."""
        while self._end is None:
            event = await self._receive()
            if event["type"] == "websocket.disconnect":
                code, reason = event.get("code") or CloseCode.NO_STATUS_RCVD, event.get("reason") or ""
                self._ended(None if code in _LOST else Close(code, reason), None)
                return
            message = event.get("bytes")
            if message is None:
                message = (event.get("text") or "").encode()
            if len(message) > self._max_bytes:
                await self.close(CloseCode.MESSAGE_TOO_BIG)
                return
            self._unread.append(message)
            self._unread_bytes += len(message)
            self._news.set()
            if len(self._unread) > MOST_UNREAD or self._unread_bytes > MOST_UNREAD_FULL * self._max_bytes:
                told = "The device sends steps faster than they are answered, and goes on."
                with contextlib.suppress(ConnectionClosed):
                    await self.send(encode(ErrorFrame("limit", told)))
                await self.close(CloseCode.POLICY_VIOLATION, "limit")
                return

    async def recv(self, decode: Literal[False] = False) -> bytes:  # noqa: ARG002
        """The next message, as bytes. Raises :class:`ConnectionClosed` when there will be no more."""
        while not self._unread:
            if self._end is not None:
                raise self._error()
            self._news.clear()
            await self._news.wait()
        message = self._unread.popleft()
        self._unread_bytes -= len(message)
        return message

    async def send(self, message: bytes) -> None:
        if self._end is not None:
            raise self._error()
        try:
            await self._send({"type": "websocket.send", "bytes": bytes(message)})
        except Exception:  # each ASGI server has its own for a peer that is gone
            self._ended(None, None)
            raise self._error() from None

    async def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        if self._end is not None:
            return
        self._ended(None, Close(code, reason))
        with contextlib.suppress(Exception):  # it may be gone already
            await self._send({"type": "websocket.close", "code": int(code), "reason": reason})

    def abort(self) -> None:
        """End it at once. There is no way to do so without a word here, and the device has left anyway."""
        if self._end is None:
            self._farewell = asyncio.ensure_future(self.close(CloseCode.GOING_AWAY))

    def _ended(self, received: Close | None, sent: Close | None) -> None:
        self._end = (received, sent)
        self.state = State.CLOSED
        if sent is not None:  # what the device said meanwhile is of no interest any more
            self._unread.clear()
            self._unread_bytes = 0
        self._news.set()

    def _error(self) -> ConnectionClosed:
        received, sent = self._end or (None, None)
        if received is not None and received.code in (CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY):
            return ConnectionClosedOK(received, received, True)
        return ConnectionClosedError(received, sent)


def _request_of(scope: Event) -> Request:
    headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])
    return Request(scope["path"], headers)


async def _answer(send: Send, kind: str, response: Response) -> None:
    """An HTTP answer, to a request or in place of a WebSocket."""
    headers = [(name.lower().encode(), value.encode()) for name, value in response.headers.raw_items()]
    start = {"type": f"{kind}.response.start", "status": response.status_code, "headers": headers}
    await send(start)
    await send({"type": f"{kind}.response.body", "body": bytes(response.body)})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
