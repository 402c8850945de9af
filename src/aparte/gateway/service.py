"""Writes what was ordered: choice after choice, as a whole or as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aparte.answer import Answer
from aparte.api import Aparte
from aparte.gateway.accounts import usage
from aparte.gateway.events import Events, comment, data
from aparte.gateway.metrics import Metrics
from aparte.gateway.problems import from_exception
from aparte.gateway.replies import Choice, Envelope, Spelling
from aparte.gateway.translate import Order
from aparte.live import Reading


class Service:
    """What the endpoints do, without HTTP."""

    def __init__(self, model: Aparte, name: str, metrics: Metrics) -> None:
        """``name`` is what the model is called in answers."""
        self._model = model
        self._name = name
        self._metrics = metrics
        self._spelling = Spelling(model.codec)

    async def complete(self, order: Order) -> dict[str, Any]:
        """The whole answer. Cancelling this ends the work within one step."""
        choices: list[Choice] = []
        answers: list[Answer] = []
        async with contextlib.aclosing(self._write(order, answers)) as written:
            async for choice, _ in written:
                if choice not in choices[-1:]:
                    choices.append(choice)
        envelope = Envelope(self._name, order.chat)
        return envelope.whole([choice.whole() for choice in choices], self._usage(order, answers))

    async def events(self, order: Order) -> Events:
        """The answer as server-sent events. Closing this ends the work within one step."""
        envelope = Envelope(self._name, order.chat)
        answers: list[Answer] = []
        started: set[int] = set()
        begun = False
        try:
            async with contextlib.aclosing(self._write(order, answers)) as written:
                async for choice, event in written:
                    begun = True
                    if isinstance(event, Reading):
                        yield comment(f"reading the prompt, {event.done} of {event.total} tokens")
                        continue
                    if order.chat and choice.index not in started:
                        started.add(choice.index)
                        first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
                        yield data(envelope.chunk([first | {"logprobs": None, "finish_reason": None}]))
                    yield data(envelope.chunk([event]))
        except Exception as error:
            if not begun:
                raise  # it can still be an HTTP status
            yield data(from_exception(error).to_json())
            return
        if order.include_usage:
            yield data(envelope.chunk([]) | {"usage": self._usage(order, answers)})
        yield "data: [DONE]\n\n"

    async def _write(
        self, order: Order, answers: list[Answer]
    ) -> AsyncGenerator[tuple[Choice, Reading | dict[str, Any]], None]:
        """Every choice with what happens to it; ``answers`` gets each one that was begun."""
        for index, (prompt, options) in enumerate(order.choices()):
            choice = Choice(index, order, self._spelling)
            async with self._model.live(prompt, options) as live:
                try:
                    async for event in live.events():
                        yield choice, event if isinstance(event, Reading) else choice.take(event)
                finally:
                    self._metrics.answer(live.answer)
                answers.append(live.answer)
                yield choice, choice.end(live.answer.finish_reason)

    def _usage(self, order: Order, answers: list[Answer]) -> dict[str, Any]:
        connection = self._model.connection
        prompts = sum(map(len, order.prompts))
        replaced = None if order.names is None else order.names.count
        return usage(answers, prompts, connection.target, self._model.front_layers, replaced)
