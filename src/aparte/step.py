"""A step: what one round trip asks of every stage.

Slots. A *slot* is the number of a token-tree node. The device gives them out; they are absolute, so a
step can be repeated after a lost connection and means the same again. Children always have larger slots
than their parents. The rules a stage follows, in this order:

1. Every node with a slot ``>= base`` is forgotten (this step writes there).
2. ``commit`` becomes the tip of the committed path; what is neither on the path to it nor below it is
   pruned. A ``commit`` behind the current tip is a rollback; :data:`ROOT` empties the tree.
3. The new nodes get the slots ``base, base + 1, ...`` and hang below ``parents``.

Positions (depths), attention masks and rotary embeddings follow from that and never cross the wire.

The first token's slot is 0. Models whose rotary embeddings are others for texts longer than some length (of
the kind *longrope*) are the exception: there such a text begins at the slot of that number, and by this the
stages know which ones to use, for all of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aparte.errors import SlotError

#: The parent of the first token, and the ``commit`` of an empty tree.
ROOT = -1


@dataclass(frozen=True)
class Step:
    """One step over ``len(parents)`` new nodes.

    ``number`` counts the steps of a session, ``epoch`` goes up when steps in flight became worthless.
    """

    number: int
    epoch: int
    commit: int
    base: int
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.commit < ROOT or self.base < 0 or self.number < 0 or self.epoch < 0:
            raise SlotError("A step has a negative number, epoch or slot.")
        if self.commit >= self.base:
            raise SlotError(f"Step {self.number} commits slot {self.commit}, which it is about to overwrite.")
        for offset, parent in enumerate(self.parents):
            if not ROOT <= parent < self.base + offset:
                raise SlotError(
                    f"Step {self.number}: node {self.base + offset} names parent {parent}, "
                    "which does not come before it."
                )

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def slots(self) -> range:
        """Slots of the new nodes."""
        return range(self.base, self.base + len(self.parents))

    @property
    def is_chain(self) -> bool:
        """True if the nodes form one chain below ``commit``: prefill, or a drafted block."""
        return self.parents == chain_parents(self.commit, self.base, len(self.parents))


def chain_parents(tip: int, base: int, count: int) -> tuple[int, ...]:
    """Parents of ``count`` nodes with slots from ``base`` that form a chain below slot ``tip``."""
    return (tip, *range(base, base + count - 1)) if count else ()


def depths(parents: Sequence[int], base: int, tip: int) -> list[int]:
    """Depth of each new node below the committed tip (1 for its children); ``tip`` itself has depth 0.

    For trees that hang below the tip only, as the device builds them.
    """
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent == tip else result[parent - base] + 1)
    return result
