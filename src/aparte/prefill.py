"""Reading a prompt: chunks that go ahead of the first step.

The same happens to a text that is half written when the target has lost what it held of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aparte.session import Session
from aparte.target.base import Ask, Target, Timing

if TYPE_CHECKING:
    from aparte.decode import Job, PrefillProgress


class Prefill:
    """Sends all but the last chunk of a prompt; the last one travels with the first drafts.

    A few chunks are in flight at a time, so that front, middle and back work on different ones and
    neither side has to buffer a long prompt.
    """

    IN_FLIGHT = 4

    def __init__(
        self, target: Target, session: Session, job: Job, on_progress: PrefillProgress | None = None
    ) -> None:
        self._target = target
        self._session = session
        self._job = job
        self._on_progress = on_progress
        self._kept = len(session.tokens)  # read before
        self._total = 0
        self._done = 0
        self._waiting: list[int] = []  # sizes of the chunks that are not answered yet
        self._timing: Timing | None = None

    def __bool__(self) -> bool:
        """Whether chunks are under way."""
        return bool(self._waiting)

    def send(self, context: Sequence[int]) -> None:
        """Send what a step cannot carry of the tokens of ``context`` without slots: nothing, as a rule."""
        missing = context[len(self._session.tokens) :]
        self._total = len(context) - self._kept
        chunk = min(self._job.prefill_chunk, max(1, self._target.max_nodes // 2))
        for start in range(0, len(missing) - chunk, chunk):
            tokens = missing[start : start + chunk]
            step = self._session.chain(len(tokens))
            self._target.submit(step, tokens, Ask(len(tokens)))
            self._session.commit(tokens, step.slots)
            self._waiting.append(len(tokens))
            if len(self._waiting) > self.IN_FLIGHT:
                self._collect()

    def finish(self) -> Timing | None:
        """Collect what is still under way; the sum of all chunks' timings, or None if there were none."""
        while self._waiting:
            self._collect()
        timing, self._timing = self._timing, None
        return timing

    def _collect(self) -> None:
        timing = self._job.recovery.collect(self._target).timing
        self._timing = timing if self._timing is None else self._timing + timing
        self._done += self._waiting.pop(0)
        self._job.recovery.reached(self._kept + self._done)
        if self._on_progress:
            self._on_progress(self._done, self._total)
