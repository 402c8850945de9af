"""Server-sent events: kept alive while nothing happens, ended when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Events = AsyncGenerator[str, None]


class EventStream(Response):
    """Sends ``events``, of which the first is under way already.

    Whenever nothing came for ``interval_s`` seconds it sends a comment, so that proxies and clients don't
    give up while a long prompt is read. However it ends, ``events`` is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, first: asyncio.Future[str | None], interval_s: float) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._pending = first
        self._interval_s = interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        gone = asyncio.ensure_future(until_gone(receive))
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await send(start)
            while (text := await self._next(gone)) is not None:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            await stop(self._events, self._pending)

    async def _next(self, gone: asyncio.Future[None]) -> str | None:
        waiting: set[asyncio.Future[Any]] = {self._pending, gone}
        await asyncio.wait(waiting, timeout=self._interval_s, return_when=asyncio.FIRST_COMPLETED)
        if self._pending.done():
            event = self._pending.result()
            if event is not None:
                self._pending = next_of(self._events)
            return event
        return None if gone.done() else comment("keep-alive")


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def next_of(events: Events) -> asyncio.Future[str | None]:
    """The next event, under way; None at the end."""

    async def take() -> str | None:
        return await anext(events, None)

    return asyncio.ensure_future(take())


async def stop(events: Events, pending: asyncio.Future[str | None]) -> None:
    """End ``events``, and what is under way of it."""
    pending.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await pending
    await events.aclose()


def data(content: dict[str, Any]) -> str:
    """An event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def comment(text: str) -> str:
    """A line that clients skip."""
    return f": {text}\n\n"
