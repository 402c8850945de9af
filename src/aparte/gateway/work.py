"""The choices of one request, written at the same time as far as sessions are free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from aparte.answer import Answer
from aparte.api import Aparte
from aparte.gateway.metrics import Metrics
from aparte.gateway.replies import Choice, Spelling
from aparte.gateway.translate import Order
from aparte.live import Reading
from aparte.options import Options
from aparte.pool import Part


class Work:
    """Each choice has a session of its own while it is written.

    Where fewer are free, some choices wait for others of the same request; none takes a session that another
    request waits for.
    """

    def __init__(self, model: Aparte, order: Order, spelling: Spelling, metrics: Metrics) -> None:
        self._model = model
        self._metrics = metrics
        self._waiting: deque[tuple[Choice, tuple[int, ...], Options]] = deque(
            (Choice(index, order, spelling), prompt, options)
            for index, (prompt, options) in enumerate(order.choices())
        )
        self._answers: dict[int, Answer] = {}
        self._writers: set[asyncio.Task[None]] = set()
        self._seeking = 0  # of the writers, those that have no session yet
        #: None is a choice's end, an error that of all of them.
        self._happened: asyncio.Queue[tuple[Choice, Reading | Part | None] | Exception] = asyncio.Queue()

    @property
    def answers(self) -> list[Answer]:
        """Those that are complete, in the order of their choices."""
        return [self._answers[index] for index in sorted(self._answers)]

    async def events(self) -> AsyncGenerator[tuple[Choice, Reading | dict[str, Any]], None]:
        """Every choice with what happens to it, as it happens.

        What ends one choice early ends all. Closing this ends them within one step.
        """
        writing = 0
        try:
            while self._waiting or writing:
                writing += self._begin(max(self._model.pool.free - self._seeking, 0 if writing else 1))
                happened = await self._happened.get()
                if isinstance(happened, Exception):
                    raise happened
                choice, event = happened
                if isinstance(event, Reading):
                    yield choice, event
                elif event is not None:
                    yield choice, choice.take(event)
                else:
                    writing -= 1
                    yield choice, choice.end(self._answers[choice.index].finish_reason)
        finally:
            for writer in self._writers:
                writer.cancel()
            await asyncio.gather(*self._writers, return_exceptions=True)

    def _begin(self, count: int) -> int:
        """Have ``count`` more choices written, if there are so many; how many there were."""
        begun = min(count, len(self._waiting))
        for _ in range(begun):
            self._seeking += 1
            self._writers.add(asyncio.ensure_future(self._write(*self._waiting.popleft())))
        return begun

    async def _write(self, choice: Choice, prompt: tuple[int, ...], options: Options) -> None:
        seeking = True
        try:
            async with self._model.live(prompt, options) as live:
                self._seeking -= 1
                seeking = False
                try:
                    async for event in live.events():
                        self._happened.put_nowait((choice, event))
                finally:
                    self._metrics.answer(live.answer)
            self._answers[choice.index] = live.answer
            self._happened.put_nowait((choice, None))
        except Exception as error:
            self._happened.put_nowait(error)
        finally:
            self._seeking -= seeking
