"""Writes what was ordered, as a whole or as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from aparte.answer import Answer
from aparte.api import Aparte
from aparte.gateway.accounts import usage
from aparte.gateway.events import Events, comment, data
from aparte.gateway.metrics import Metrics
from aparte.gateway.problems import from_exception
from aparte.gateway.replies import Choice, Envelope, Spelling
from aparte.gateway.translate import Order
from aparte.gateway.work import Work
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
        choices: dict[int, Choice] = {}
        work = Work(self._model, order, self._spelling, self._metrics)
        async with contextlib.aclosing(work.events()) as written:
            async for choice, _ in written:
                choices[choice.index] = choice
        envelope = Envelope(self._name, order.chat)
        whole = [choices[index].whole() for index in sorted(choices)]
        return envelope.whole(whole, self._usage(order, work.answers))

    async def events(self, order: Order) -> Events:
        """The answer as server-sent events. Closing this ends the work within one step."""
        envelope = Envelope(self._name, order.chat)
        work = Work(self._model, order, self._spelling, self._metrics)
        started: set[int] = set()
        begun = False
        try:
            async with contextlib.aclosing(work.events()) as written:
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
            yield data(envelope.chunk([]) | {"usage": self._usage(order, work.answers)})
        yield "data: [DONE]\n\n"

    def _usage(self, order: Order, answers: Sequence[Answer]) -> dict[str, Any]:
        connection = self._model.connection
        prompts = sum(map(len, order.prompts))
        replaced = None if order.names is None else order.names.count
        return usage(answers, prompts, connection.target, self._model.front_layers, replaced)
