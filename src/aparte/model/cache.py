"""The key-value cache of one session in one stage, addressed by slots.

Decoder layers of Hugging Face ``transformers`` ask a cache for one thing: ``update(keys, values,
layer_idx)``, which stores the new rows and returns everything to attend to. That call is the whole
interface to them; nothing here depends on the cache classes of that library.
"""

from __future__ import annotations

from typing import Any

import torch

from aparte.config import KvName
from aparte.errors import SlotError
from aparte.model.kv import Rows, make_rows
from aparte.model.tree import Layout, SlotTree
from aparte.step import Step

#: Rows allocated at first; the buffers double from there, so that growth costs amortised constant time.
INITIAL_ROWS = 256


class SlotCache:
    """Keys and values of every slot for the layers ``first_layer .. first_layer + layers - 1``."""

    def __init__(self, first_layer: int, layers: int, max_rows: int, kv: KvName = "model") -> None:
        self._first_layer = first_layer
        self._max_rows = max_rows
        self._keys = [make_rows(kv) for _ in range(layers)]
        self._values = [make_rows(kv) for _ in range(layers)]
        self._layout: Layout | None = None
        self.tree = SlotTree()
        #: Bytes of memory held.
        self.nbytes = 0

    @property
    def row_bytes(self) -> int:
        """What one row takes in all layers, 0 while the cache is empty."""
        return self.nbytes // self._allocated if self._allocated else 0

    def growth(self, step: Step, row_bytes: int) -> int:
        """Bytes that ``step`` will need beyond those held; a row takes ``row_bytes``."""
        allocated = self._allocated
        if self.tree.rows + len(step) <= allocated:  # as nearly always; no need to look what is pruned
            return 0
        rows = min(sum(slot < step.base for slot in self.tree.slots) + len(step), self._max_rows)
        return max(0, self._rows_to_hold(rows) - allocated) * row_bytes

    @property
    def _allocated(self) -> int:
        """Rows that there is room for; the last layer grows last."""
        return self._values[-1].capacity

    def _rows_to_hold(self, total: int) -> int:
        rows = self._allocated or min(INITIAL_ROWS, self._max_rows)
        while rows < total:
            rows = min(rows * 2, self._max_rows)
        return rows

    def begin(self, step: Step) -> Layout:
        """Apply ``step`` to the tree and make room; the layers' ``update`` calls come next.

        Raises :class:`SlotError` if the step does not fit the tree, or the sequence the context.
        """
        if self.tree.rows + len(step) > self._max_rows:
            # Pruning may make room; look before touching anything.
            kept = sum(slot < step.base for slot in self.tree.slots)
            if kept + len(step) > self._max_rows:
                raise SlotError(f"The token tree would outgrow its {self._max_rows} slots.")
        layout = self.tree.apply(step)
        self._layout = layout
        if layout.moves:
            self._compact(list(layout.moves), layout.move_to)
        return layout

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new nodes' keys and values, ``[1, H, n, head_dim]``; return those of all rows in use."""
        layout = self._layout
        if layout is None or keys.shape[2] != layout.total - layout.first_row:
            raise SlotError("A layer stores a different number of nodes than the step announced.")
        index = layer_idx - self._first_layer
        return (
            self._store(self._keys[index], keys, layout),
            self._store(self._values[index], values, layout),
        )

    def check_integrity(self) -> None:
        """Raise :class:`SlotError` if rows and slots disagree. Cheap enough to call when idle."""
        self.tree.check_integrity()
        for rows in (*self._keys, *self._values):
            if 0 < rows.capacity < self.tree.rows:
                raise SlotError("The cache has fewer rows than the tree has nodes.")

    def _store(self, rows: Rows, new: torch.Tensor, layout: Layout) -> torch.Tensor:
        if rows.capacity < layout.total:
            held = rows.nbytes
            rows.grow(new, self._rows_to_hold(layout.total), layout.first_row)
            self.nbytes += rows.nbytes - held
        return rows.store(new, layout.first_row)

    def _compact(self, moves: list[int], to: int) -> None:
        """Gather the rows ``moves`` to ``to, to + 1, ...`` in every layer."""
        index: torch.Tensor | None = None
        for rows in (*self._keys, *self._values):
            if rows.device is not None:
                if index is None:
                    index = torch.tensor(moves, device=rows.device)
                rows.move(index, to)
