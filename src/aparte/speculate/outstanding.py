"""What was proposed and whose outcome is still to come: with pipelining that is more than one proposal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from aparte.speculate.drafter import Outcome

P = TypeVar("P")

#: Older proposals are forgotten.
MOST = 16


class Outstanding(Generic[P]):
    """Proposals by the length of their context, the oldest first."""

    def __init__(self) -> None:
        self._proposals: dict[int, P] = {}

    def __bool__(self) -> bool:
        return bool(self._proposals)

    def begin(self, context: Sequence[int]) -> bool:
        """A proposal for ``context`` comes: what there is for as long a context, or a longer one, was wrong
        or not sent. True if another one is still under way."""
        self._proposals = {size: one for size, one in self._proposals.items() if size < len(context)}
        return bool(self._proposals)

    def add(self, context: Sequence[int], proposal: P) -> None:
        """``proposal`` was made for ``context``."""
        self._proposals[len(context)] = proposal
        if len(self._proposals) > MOST:
            del self._proposals[next(iter(self._proposals))]

    def settle(self, outcome: Outcome) -> P:
        """The proposal that ``outcome`` is about, which is taken out. Shorter ones are of an answer that
        ended while they were under way."""
        size = len(outcome.context) or max(self._proposals)
        proposal = self._proposals.pop(size)
        self._proposals = {longer: one for longer, one in self._proposals.items() if longer > size}
        return proposal
