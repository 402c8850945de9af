"""An answer that is written on its conversation's own thread while an event loop does other things."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from aparte.answer import Answer
from aparte.errors import AparteError
from aparte.options import Options
from aparte.pool import Part, Pool, Seat, close


class LeftError(AparteError):
    """Nobody wants the answer any more."""


@dataclass(frozen=True)
class Reading:
    """So many of the prompt's new tokens have been read."""

    done: int
    total: int


class LiveAnswer:
    """Use as an asynchronous context manager: when it ends, so does the work, at the cloud within one step.

    >>> async with LiveAnswer(pool, prompt, options) as live:
    ...     async for event in live.events():
    ...         ...
    """

    def __init__(self, pool: Pool, prompt: Sequence[int], options: Options) -> None:
        self._pool = pool
        self._prompt = prompt
        self._options = options
        self._events: asyncio.Queue[Reading | Part | BaseException | None] = asyncio.Queue()
        self._left = threading.Event()
        self._loop = asyncio.get_running_loop()
        #: Grows while it is written; complete when the events end.
        self.answer = Answer("", "", len(prompt))

    async def __aenter__(self) -> LiveAnswer:
        """Wait for a session. Raises :class:`~aparte.errors.AparteError` if there will be none."""
        waiting = self._pool.acquire(self._prompt)
        try:
            seat = await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            if not waiting.cancel():  # it is being opened, or is here already
                waiting.add_done_callback(self._give_back)
            raise
        done = seat.thread.submit(self._write, seat)
        # Only then: while the thread is in a step the session is in use.
        done.add_done_callback(lambda _: self._pool.release(seat))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left.set()

    async def events(self) -> AsyncIterator[Reading | Part]:
        """What happens, as it happens. Raises what ended the answer early, if anything did."""
        while True:
            event = await self._events.get()
            if event is None:
                return
            if isinstance(event, BaseException):
                raise event
            yield event

    def _give_back(self, waiting: Future[Seat]) -> None:
        if not waiting.cancelled() and waiting.exception() is None:
            self._pool.release(waiting.result())

    # -- on the conversation's thread ------------------------------------------------------------------

    def _write(self, seat: Seat) -> None:
        end: BaseException | None = None
        try:
            self._check_left()
            self.answer, parts = seat.write(self._prompt, self._options, self._read)
            try:
                for part in parts:
                    self._post(part)
                    if self._left.is_set():
                        break
            finally:
                close(parts)
        except BaseException as error:
            end = error
        self._post(end)

    def _read(self, done: int, total: int) -> None:
        self._check_left()
        self._post(Reading(done, total))

    def _check_left(self) -> None:
        if self._left.is_set():
            raise LeftError("Nobody waits for this answer any more.")

    def _post(self, event: Reading | Part | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            self._left.set()
