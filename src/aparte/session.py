"""The device's record of one conversation with a target: which tokens lie in which slots.

The device owns the truth. Whatever the stages hold can be rebuilt from :attr:`Session.tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

from aparte.speculate.tree import BELOW_ROOT, DraftTree
from aparte.step import ROOT, Step, chain_parents


class Session:
    """Committed tokens and their slots, and the numbering of steps."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.slots: list[int] = []
        self._number = 0

    @property
    def tip(self) -> int:
        """Slot of the last committed token."""
        return self.slots[-1] if self.slots else ROOT

    def rewind_to(self, prompt: Sequence[int]) -> int:
        """Keep what ``prompt`` shares with the committed tokens, and return how many tokens that is.

        At least the last token of the prompt is never kept: its logits are needed.
        """
        limit = min(len(self.tokens), len(prompt) - 1)
        shared = next((i for i in range(limit) if self.tokens[i] != prompt[i]), limit)
        del self.tokens[shared:], self.slots[shared:]
        return shared

    def chain(self, count: int) -> Step:
        """A step that appends ``count`` tokens to the committed path."""
        return self.grow(count, DraftTree())

    def grow(self, chain: int, tree: DraftTree) -> Step:
        """A step of ``chain`` tokens below the tip and, below the last of them, a draft tree.

        Slots beyond the tip are written anew, so whatever an earlier step left there is gone.
        """
        tip = self.tip
        base = tip + 1
        first_draft = base + chain
        parents = chain_parents(tip, base, chain) + tuple(
            first_draft - 1 if parent == BELOW_ROOT else first_draft + parent for parent in tree.parents
        )
        self._number += 1
        return Step(number=self._number, epoch=0, commit=tip, base=base, parents=parents)

    def commit(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Make ``tokens``, which were evaluated in ``slots``, part of the committed path."""
        self.tokens.extend(tokens)
        self.slots.extend(slots)

    def clear(self) -> None:
        """Forget everything: the target lost its cache and has to be prefilled again."""
        self.tokens.clear()
        self.slots.clear()
        self._number = 0
