"""An answer under way and a conversation, as the library hands them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aparte.answer import Answer
from aparte.errors import UserError
from aparte.options import Options
from aparte.pool import Part, Pool, Seat, close
from aparte.text.tokenizer import Message

if TYPE_CHECKING:
    from aparte.api import Aparte


class Stream:
    """An answer under way: iterate over its parts. Leaving ``with`` early ends the work within one step.

    ``answer`` grows meanwhile, and holds everything that it took in the end.
    """

    def __init__(self, pool: Pool, prompt: Sequence[int], options: Options) -> None:
        self._pool = pool
        self._seat: Seat | None = pool.acquire(prompt).result()
        try:
            self.answer, self._parts = self._seat.write(prompt, options)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        try:
            return next(self._parts)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop, and give the session back."""
        seat, self._seat = self._seat, None
        if seat is not None:
            if hasattr(self, "_parts"):
                close(self._parts)
            self._pool.release(seat)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Chat:
    """A conversation. The cloud keeps its beginning, so a follow-up sends only what is new."""

    def __init__(self, model: Aparte, system: str | None, options: Options) -> None:
        self._model = model
        self._options = options
        #: What was said, as the chat template takes it.
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, **options: Any) -> Answer:
        """Say something and wait for the answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        chosen = merged(self._options, options)
        with Stream(self._model.pool, self._model.encode(messages), chosen) as stream:
            for _ in stream:
                pass
        self.messages = [*messages, {"role": "assistant", "content": stream.answer.text}]
        return stream.answer


def merged(base: Options, changes: dict[str, Any]) -> Options:
    """``changes`` over ``base``; lists and dictionaries become what :class:`Options` has."""
    names = set(Options.__dataclass_fields__)
    if unknown := sorted(changes.keys() - names):
        raise UserError(f"There is no option {unknown[0]}. Known: {', '.join(sorted(names))}.")
    if "stop" in changes:
        stop = changes["stop"]
        changes = changes | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    if changes.get("eos") is not None:
        changes = changes | {"eos": tuple(changes["eos"])}
    if isinstance(changes.get("logit_bias"), dict):
        changes = changes | {"logit_bias": tuple(sorted(changes["logit_bias"].items()))}
    return replace(base, **changes)
