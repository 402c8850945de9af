"""Jacobi decoding: fixed-point iteration over a block of guesses (paper A, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

from aparte.speculate.drafter import Outcome
from aparte.speculate.tree import DraftTree

#: Chance that a guess survives one more position; only orders nodes when drafters are combined.
_DECAY = 0.3


class Jacobi:
    """Guesses a block, then replaces every guess by what the target says after its predecessor.

    One iteration is one round trip. The first guesses are arbitrary (the pending token repeated); each
    round trip makes at least the first one right, and a fixed point is the sequential text.
    """

    runs_ahead = False  # the guesses are iterated from one outcome to the next

    def __init__(self, block: int) -> None:
        self._block = block
        self._guesses: list[int] = []

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        size = min(self._block, budget)
        guesses = (self._guesses + [context[-1]] * size)[:size]
        return DraftTree(
            tokens=tuple(guesses),
            parents=tuple(range(-1, size - 1)),
            probabilities=tuple(_DECAY ** (1 + depth) for depth in range(size)),
        )

    def observe(self, outcome: Outcome) -> None:
        # The target's choices after the accepted path are the next iterate, one position further on.
        self._guesses = list(outcome.choices[len(outcome.accepted.tokens) :])
