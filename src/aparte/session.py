"""The device's record of one conversation with a target: which tokens lie in which slots.

The device owns the truth. Whatever the stages hold can be rebuilt from :attr:`Session.tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

from aparte.speculate.tree import BELOW_ROOT, DraftTree
from aparte.step import ROOT, Step, chain_parents


class Session:
    """Committed tokens and their slots, and the numbering of steps.

    It belongs to one target. Step numbers and epochs only ever go up, because the cloud may still hold
    steps that were abandoned, and tells them apart by that.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.slots: list[int] = []
        #: Slot of the first token; see :mod:`aparte.step`.
        self.origin = 0
        #: Steps sent ahead for nothing since the beginning, and the nodes in them.
        self.stale_steps = 0
        self.stale_nodes = 0
        self._number = 0
        self._epoch = 0

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
        base = self.tip + 1 if self.slots else self.origin
        first_draft = base + chain
        parents = chain_parents(self.tip, base, chain) + _hung(tree, first_draft - 1, first_draft)
        return self._step(base, parents)

    def ahead(self, last: Step, below: int, tree: DraftTree) -> Step:
        """A step of a draft tree below slot ``below`` of ``last``, which is still under way.

        Its slots follow those of ``last``, so that it overwrites nothing that may yet be accepted.
        """
        return self._step(last.slots.stop, _hung(tree, below, last.slots.stop))

    def abandon(self, steps: Sequence[Step]) -> None:
        """Declare these steps, the last ones sent, worthless.

        The stages learn it from the next step: its epoch is higher, and it writes over their slots.
        """
        self._epoch += 1
        self.stale_steps += len(steps)
        self.stale_nodes += sum(map(len, steps))

    def commit(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Make ``tokens``, which were evaluated in ``slots``, part of the committed path."""
        self.tokens.extend(tokens)
        self.slots.extend(slots)

    def clear(self) -> None:
        """Forget everything: the target lost its cache and has to be prefilled again."""
        self.tokens.clear()
        self.slots.clear()

    def restart(self, origin: int) -> bool:
        """Forget everything and begin at another slot. True if the target has to forget something too."""
        self.clear()
        self.origin = origin
        return self._number > 0

    def _step(self, base: int, parents: tuple[int, ...]) -> Step:
        self._number += 1
        return Step(self._number, self._epoch, commit=self.tip, base=base, parents=parents)


def _hung(tree: DraftTree, root: int, first: int) -> tuple[int, ...]:
    """Parents of the tree's nodes if they hang below slot ``root`` and take the slots from ``first``."""
    return tuple(root if parent == BELOW_ROOT else first + parent for parent in tree.parents)
