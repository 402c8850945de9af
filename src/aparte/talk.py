"""An answer under way and a conversation, as the library hands them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aparte.answer import Answer
from aparte.decode import PrefillProgress
from aparte.errors import UserError
from aparte.hidden import Restoring, hide_options
from aparte.options import Options
from aparte.pool import Part, Pool, Seat, close
from aparte.privacy.pseudonyms import Pseudonyms
from aparte.text.tokenizer import Message

if TYPE_CHECKING:
    from aparte.api import Aparte


class Stream:
    """An answer under way: iterate over its parts. Leaving ``with`` early ends the work within one step.

    ``answer`` grows meanwhile, and holds everything that it took in the end.
    """

    def __init__(
        self,
        pool: Pool,
        prompt: Sequence[int],
        options: Options,
        *,
        names: Pseudonyms | None = None,
        on_prefill: PrefillProgress | None = None,
        on_end: Callable[[Stream], None] | None = None,
    ) -> None:
        """``names`` are what was replaced in ``prompt`` and ``options``. ``on_prefill`` is told how much of a
        long prompt has been read, ``on_end`` that no more is written."""
        self._pool = pool
        self._names = names
        self._restoring = Restoring(names, options)
        self._on_end = on_end
        self._seat: Seat | None = pool.acquire(prompt).result()
        try:
            self.answer, self._parts = self._seat.write(prompt, options, on_prefill)
        except BaseException:
            pool.release(self._seat)
            self._seat = None
            raise

    @property
    def written(self) -> str:
        """What the model wrote so far, stand-ins and all."""
        return self._restoring.written

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        try:
            part = self._restoring.take(next(self._parts))
        except BaseException:
            self.close()
            raise
        self.answer.text = self._restoring.text
        return part

    def close(self) -> None:
        """Stop, and give the session back."""
        seat, self._seat = self._seat, None
        if seat is None:
            return
        try:
            close(self._parts)
        finally:
            self._pool.release(seat)
        self._restoring.finish()
        self.answer.text = self._restoring.text
        if self._names is not None:
            self._names.answered(self.written)
        if self._on_end is not None:
            self._on_end(self)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Chat:
    """A conversation. The cloud keeps its beginning, so a follow-up sends only what is new."""

    def __init__(
        self, model: Aparte, system: str | None, options: Options, names: Pseudonyms | None = None
    ) -> None:
        """``names`` are the stand-ins of this conversation, if names are replaced."""
        self._model = model
        self._options = options
        self._names = names
        self._start: list[Message] = []
        if system:
            self._start = [{"role": "system", "content": self._hidden(system)}]
        #: What was said, as the chat template takes it: as the model sees it, stand-ins and all, so that a
        #: follow-up begins with what the cloud holds.
        self.messages: list[Message] = list(self._start)

    def say(self, text: str, **options: Any) -> Answer:
        """Say something and wait for the answer."""
        with self.stream(text, **options) as stream:
            for _ in stream:
                pass
        return stream.answer

    def stream(self, text: str, *, on_prefill: PrefillProgress | None = None, **options: Any) -> Stream:
        """Say something; the answer comes round trip by round trip.

        What was said stays said, also if the answer is stopped or the cloud goes away in the middle. If
        nothing of it was written, the question was not asked.
        """
        messages = [*self.messages, {"role": "user", "content": self._hidden(text)}]
        chosen = merged(self._options, options)
        if self._names is not None:
            chosen = hide_options(chosen, self._names.hide)

        def end(stream: Stream) -> None:
            if stream.written or stream.answer.finish_reason is not None:
                self.messages = [*messages, {"role": "assistant", "content": stream.written}]

        return Stream(
            self._model.pool,
            self._model.encode(messages),
            chosen,
            names=self._names,
            on_prefill=on_prefill,
            on_end=end,
        )

    def reset(self) -> None:
        """Begin again, with what the system was told."""
        self.messages = list(self._start)

    def _hidden(self, text: str) -> str:
        return text if self._names is None else self._names.hide(text)


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
