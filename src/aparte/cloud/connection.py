"""What the server needs of a connection, whoever speaks WebSocket below it.

``websockets`` does in ``aparte serve``. Under Ray Serve the proxy does, and hands messages on as ASGI events
(:mod:`aparte.cloud.asgi`). Sessions, limits and errors are the same code for both.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from websockets.http11 import Response
from websockets.protocol import State


class Abortable(Protocol):
    """The way to end a connection without a word."""

    def abort(self) -> None: ...


class Connection(Protocol):
    """One WebSocket connection. Its end is a :class:`websockets.exceptions.ConnectionClosed`."""

    @property
    def transport(self) -> Abortable: ...

    @property
    def state(self) -> State: ...

    @property
    def remote_address(self) -> Any:
        """The peer's host and port, first and second; None or empty if that is not known."""

    def respond(self, status: Any, text: str) -> Response:
        """An answer in place of a WebSocket, with ``text`` as its body."""

    async def recv(self, decode: Literal[False]) -> bytes:
        """The next message."""

    async def send(self, message: bytes) -> None:
        """Send a binary message."""

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Say goodbye."""
