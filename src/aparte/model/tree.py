"""Bookkeeping of a token tree: which slot lies in which cache row, and who may look at whom.

Pure integers; the tensors are in :mod:`aparte.model.cache`. A stage keeps the committed path in the
first rows of its cache, in order of depth, so that *row == position* there and a mask over the prefix
is trivial. Pending nodes follow in the order of their slots. The rules are those of :mod:`aparte.step`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aparte.errors import SlotError
from aparte.step import ROOT, Step


@dataclass(frozen=True)
class Node:
    """A pending node: the slot it hangs below, its position in the sequence, its cache row."""

    parent: int
    depth: int
    row: int


@dataclass(frozen=True)
class Layout:
    """Where the nodes of one step go, and what each of them sees.

    ``n`` new nodes take the rows ``first_row, first_row + 1, ...``; ``total`` rows are in use afterwards.
    ``moves`` are the rows that have to be gathered to ``move_to, move_to + 1, ...`` before that.
    ``ancestors`` is ``[n, total - prefix]``: True where a pending row is an ancestor of the node or itself.
    ``pending_depths`` holds the depth of each pending row, for sliding windows.
    """

    prefix: int
    first_row: int
    total: int
    positions: tuple[int, ...]
    moves: tuple[int, ...]
    move_to: int
    ancestors: npt.NDArray[np.bool_]
    pending_depths: npt.NDArray[np.int64]

    @property
    def sees_everything(self) -> bool:
        """True if every node sees every row (always so for a plain next-token step)."""
        return bool(self.ancestors.all())


class SlotTree:
    """The token tree of one session as one stage sees it."""

    def __init__(self) -> None:
        self._committed: list[int] = []  # slots by depth, increasing; row == depth
        self._pending: dict[int, Node] = {}  # below the tip, by increasing slot and row

    @property
    def tip(self) -> int:
        """Slot of the last committed token, :data:`~aparte.step.ROOT` while there is none."""
        return self._committed[-1] if self._committed else ROOT

    @property
    def root(self) -> int:
        """Slot of the first token, :data:`~aparte.step.ROOT` while there is none."""
        return self._committed[0] if self._committed else next(iter(self._pending), ROOT)

    @property
    def rows(self) -> int:
        """Cache rows in use."""
        return len(self._committed) + len(self._pending)

    @property
    def slots(self) -> tuple[int, ...]:
        """Every slot held, in the order of rows."""
        return (*self._committed, *self._pending)

    def positions(self, slots: Iterable[int]) -> list[int]:
        """Positions of pending nodes, such as those of the last step."""
        return [self._pending[slot].depth for slot in slots]

    def check_integrity(self) -> None:
        """Raise :class:`SlotError` unless slots increase, rows are dense and every parent exists."""
        slots = self.slots
        if any(left >= right for left, right in pairwise(slots)):
            raise SlotError("The slots of the tree are out of order.")
        depth_of = {self.tip: len(self._committed) - 1}
        for row, (slot, node) in enumerate(self._pending.items(), start=len(self._committed)):
            if node.row != row or depth_of.get(node.parent, -2) + 1 != node.depth:
                raise SlotError(f"The pending node in slot {slot} is misplaced.")
            depth_of[slot] = node.depth

    def apply(self, step: Step) -> Layout:
        """Follow the three rules of :mod:`aparte.step` and say where things go.

        Raises :class:`SlotError`, leaving the tree as it was, if the step names a slot that is not here.
        """
        kept = bisect_left(self._committed, step.base)
        pending = {slot: node for slot, node in self._pending.items() if slot < step.base}
        unmoved, path, below = self._commit(step, kept, pending)

        stay = [*path.items(), *below.items()]  # increasing in slot, and so in row
        prefix = unmoved + len(path)
        rows = [node.row for _, node in stay]
        in_place = next((i for i, row in enumerate(rows) if row != unmoved + i), len(rows))
        surviving = {
            slot: Node(node.parent, node.depth, prefix + offset)
            for offset, (slot, node) in enumerate(below.items())
        }
        layout = self._hang(step, prefix, surviving, tuple(rows[in_place:]), unmoved + in_place)

        del self._committed[unmoved:]
        self._committed.extend(path)
        self._pending = surviving
        for slot, parent, depth, row in zip(
            step.slots, step.parents, layout.positions, range(layout.first_row, layout.total), strict=True
        ):
            self._pending[slot] = Node(parent, depth, row)
        return layout

    def _commit(
        self, step: Step, kept: int, pending: dict[int, Node]
    ) -> tuple[int, dict[int, Node], dict[int, Node]]:
        """Rule 2. Returns the length of the old prefix that stays, the nodes that join it, and what
        survives below the new tip."""
        if step.commit in pending:
            path: dict[int, Node] = {}
            slot = step.commit
            while slot in pending:
                path[slot] = pending[slot]
                slot = pending[slot].parent
            path = dict(reversed(path.items()))
            return kept, path, _descendants(step.commit, pending)

        index = bisect_left(self._committed, step.commit, hi=kept) if step.commit != ROOT else -1
        if step.commit != ROOT and (index == kept or self._committed[index] != step.commit):
            raise SlotError(f"Step {step.number} commits slot {step.commit}, which this stage does not hold.")
        tail = {
            self._committed[depth]: Node(self._committed[depth - 1] if depth else ROOT, depth, depth)
            for depth in range(index + 1, kept)
        }
        return index + 1, {}, _descendants(step.commit, tail | pending)

    def _hang(
        self, step: Step, prefix: int, pending: dict[int, Node], moves: tuple[int, ...], move_to: int
    ) -> Layout:
        """Rule 3: place the new nodes and work out whom they see."""
        count, old = len(step), len(pending)
        sees = np.zeros((old + count, old + count), dtype=np.bool_)
        depth = np.zeros(old + count, dtype=np.int64)
        index = {slot: node.row - prefix for slot, node in pending.items()}
        for slot, parent, position in (
            *((slot, node.parent, node.row - prefix) for slot, node in pending.items()),
            *zip(step.slots, step.parents, range(old, old + count), strict=True),
        ):
            if parent == step.commit:
                depth[position] = prefix
            elif parent in index:
                sees[position] = sees[index[parent]]
                depth[position] = depth[index[parent]] + 1
            else:
                raise SlotError(
                    f"Step {step.number}: node {slot} hangs below slot {parent}, "
                    "which is neither the committed tip nor a node below it."
                )
            sees[position, position] = True
            index[slot] = position
        first = prefix + old
        return Layout(
            prefix=prefix,
            first_row=first,
            total=first + count,
            positions=tuple(depth[old:].tolist()),
            moves=moves,
            move_to=move_to,
            ancestors=sees[old:],
            pending_depths=depth,
        )


def _descendants(tip: int, nodes: dict[int, Node]) -> dict[int, Node]:
    """The nodes below slot ``tip``; ``nodes`` must be in increasing order of slots."""
    found: dict[int, Node] = {}
    for slot, node in nodes.items():
        if node.parent == tip or node.parent in found:
            found[slot] = node
    return found
