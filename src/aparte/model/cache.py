"""The key-value cache of one session in one stage, addressed by slots.

Decoder layers of Hugging Face ``transformers`` ask a cache for one thing: ``update(keys, values,
layer_idx)``, which stores the new rows and returns everything to attend to. That call is the whole
interface to them; nothing here depends on the cache classes of that library.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from aparte.config import KvName
from aparte.errors import SlotError
from aparte.model.kv import Rows, make_rows
from aparte.model.slab import Slab, size_class
from aparte.model.tree import Layout, SlotTree
from aparte.step import Step


class SlotCache:
    """Keys and values of every slot for the layers ``first_layer .. first_layer + layers - 1``.

    What attention gets to see are the rows that this cache was given itself, whatever lies behind them in
    a buffer. Buffers go back to their slab when the cache is closed, or at the end of the pass that is
    under way then.
    """

    def __init__(
        self, first_layer: int, layers: int, max_rows: int, kv: KvName = "model", slab: Slab | None = None
    ) -> None:
        """Buffers come from ``slab``; without one the cache has memory of its own."""
        slab = slab or Slab(keep=False)
        #: Number of the first layer in the model.
        self.first_layer = first_layer
        self._max_rows = max_rows
        self._keys = [make_rows(kv, slab) for _ in range(layers)]
        self._values = [make_rows(kv, slab) for _ in range(layers)]
        self._layout: Layout | None = None
        self._ahead = 0
        self.tree = SlotTree()
        #: Bytes of memory held.
        self.nbytes = 0
        self._lock = threading.Lock()
        self._in_pass = self._closed = False
        self._release = weakref.finalize(self, _release, (*self._keys, *self._values))
        self._release.atexit = False

    @property
    def row_bytes(self) -> int:
        """What one row takes in all layers, 0 while the cache is empty."""
        return self.nbytes // self._allocated if self._allocated else 0

    @property
    def largest_buffer(self) -> int:
        """Bytes of the largest buffer, which is there beside a larger one for a moment of growth."""
        return max(rows.nbytes for rows in (*self._keys, *self._values))

    def buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer, ``[1, H, capacity, head_dim]``, for whoever stores there himself.

        None at all while the cache is empty, or if attention is not given what lies in them.
        """
        pairs = [(keys.whole, values.whole) for keys, values in zip(self._keys, self._values, strict=True)]
        there = [(keys, values) for keys, values in pairs if keys is not None and values is not None]
        return there if len(there) == len(pairs) else []

    @property
    def in_pass(self) -> bool:
        """Whether a forward pass uses the buffers."""
        return self._in_pass

    def expect(self, nodes: int) -> None:
        """So many nodes come in the next steps, one after the other: growing once is enough for all."""
        self._ahead = nodes

    def growth(self, step: Step, row_bytes: int, ahead: int = 0) -> int:
        """Bytes that ``step`` will need beyond those held, if ``ahead`` more nodes are expected after it.

        A row takes ``row_bytes``, while the cache is empty and doesn't know itself.
        """
        allocated, new = self._allocated, len(step) + ahead
        if self.tree.rows + new <= allocated:  # as nearly always; no need to look what is pruned
            return 0
        rows = sum(slot < step.base for slot in self.tree.slots) + new
        return max(0, size_class(rows, self._max_rows) - allocated) * (self.row_bytes or row_bytes)

    @property
    def _allocated(self) -> int:
        """Rows that there is room for; the last layer grows last."""
        return self._values[-1].capacity

    def begin(self, step: Step) -> Layout:
        """Apply ``step`` to the tree and make room; the layers' ``update`` calls come next, then :meth:`end`.

        Raises :class:`SlotError` if the step does not fit the tree, or the sequence the context, or if the
        cache is closed.
        """
        with self._lock:
            if self._closed:
                raise SlotError("The session was closed.")
            self._in_pass = True
        if self.tree.rows + len(step) > self._max_rows:
            # Pruning may make room; look before touching anything.
            kept = sum(slot < step.base for slot in self.tree.slots)
            if kept + len(step) > self._max_rows:
                raise SlotError(f"The token tree would outgrow its {self._max_rows} slots.")
        layout = self.tree.apply(step)
        self._layout = layout
        self._ahead = max(0, self._ahead - len(step))
        if layout.moves:
            self._compact(list(layout.moves), layout.move_to)
        return layout

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new nodes' keys and values, ``[1, H, n, head_dim]``; return those of all rows in use."""
        key_rows, value_rows, first = self.room(keys, values, layer_idx)
        return key_rows.store(keys, first), value_rows.store(values, first)

    def room(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[Rows, Rows, int]:
        """Where a layer's keys and values are, with room for the new nodes', and from which row on."""
        layout = self._layout
        if layout is None or keys.shape[2] != layout.total - layout.first_row:
            raise SlotError("A layer stores a different number of nodes than the step announced.")
        index = layer_idx - self.first_layer
        key_rows, value_rows = self._keys[index], self._values[index]
        self._make_room(key_rows, keys, layout)
        self._make_room(value_rows, values, layout)
        return key_rows, value_rows, layout.first_row

    def end(self) -> None:
        """The pass is over, however it went. Does nothing if none is under way."""
        with self._lock:
            self._in_pass = False
            if self._closed:
                self._give_back()

    def close(self) -> None:
        """Give the buffers back. Any thread may call this, at any time."""
        with self._lock:
            self._closed = True
            if not self._in_pass:
                self._give_back()

    def _give_back(self) -> None:
        self._release()
        self.nbytes = 0

    def check_integrity(self) -> None:
        """Raise :class:`SlotError` if rows and slots disagree. Cheap enough to call when idle."""
        self.tree.check_integrity()
        for rows in (*self._keys, *self._values):
            if 0 < rows.capacity < self.tree.rows:
                raise SlotError("The cache has fewer rows than the tree has nodes.")

    def _make_room(self, rows: Rows, new: torch.Tensor, layout: Layout) -> None:
        if rows.capacity < min(layout.total + self._ahead, self._max_rows):
            held = rows.nbytes
            rows.grow(new, size_class(layout.total + self._ahead, self._max_rows), layout.first_row)
            self.nbytes += rows.nbytes - held

    def _compact(self, moves: list[int], to: int) -> None:
        """Gather the rows ``moves`` to ``to, to + 1, ...`` in every layer."""
        index: torch.Tensor | None = None
        for rows in (*self._keys, *self._values):
            if rows.device is not None:
                if index is None:
                    index = torch.tensor(moves, device=rows.device)
                rows.move(index, to)


def _release(rows: tuple[Rows, ...]) -> None:
    for each in rows:
        each.release()
