"""Steps of few nodes as recordings, which a GPU repeats without Python (``--graphs``).

A step of a few nodes takes a GPU less time to compute than it takes Python to start its kernels, one after
the other. CUDA can record kernels once and start them all together (CUDA graphs), if nothing changes but the
numbers: no shape and no address. So a recording is for a fixed number of nodes and for the buffers of one
session's cache:

- a step is filled up to 1, 2, 4, … 64 nodes. Those that fill up store into the last row that there is room
  for, which is left free for them, and see only the first;
- attention goes over all rows that there is room for, and masks hide those not in use;
- what depends on the step is copied to where the recording reads it.

When a cache grows, its recordings are of no use any more: the buffers are others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from aparte.errors import UserError
from aparte.model.cache import SlotCache
from aparte.model.inputs import HIDDEN, Inputs
from aparte.model.tree import Layout

#: How often a window is wanted before it is recorded: a recording costs as much as a few steps.
WANTED = 2
#: Most recordings at a time; those of the session that began first go first.
MOST = 256
#: Runs before a recording, in which libraries choose their kernels and get their memory.
WARM_UPS = 2

#: Outputs of layers by their number, ``[1, n, D]`` each.
Outputs = dict[int, torch.Tensor]
#: Something that computes the same from what lies in the same memory.
Run = Callable[[], Outputs]
#: Makes a run that needs no Python of one that does.
Record = Callable[[Run], Run]
#: Layers over inputs and a cache.
Layers = Callable[[Inputs, Any], Outputs]
Buffers = list[tuple[torch.Tensor, torch.Tensor]]

SIZES = (1, 2, 4, 8, 16, 32, 64)


class CudaGraphs:
    """Recordings as CUDA graphs, which share their memory: no two run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        """Raises :class:`UserError` if ``run`` waits for the GPU to tell it something."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the first runs must not be on the stream that is recorded
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"Steps of this model cannot be recorded ({reason}). Leave --graphs out."
            ) from None

        def replay() -> Outputs:
            graph.replay()
            return result

        return replay


class Windows:
    """The recordings of a stage's sessions."""

    def __init__(self, record: Record | None = None) -> None:
        """``record`` is :class:`CudaGraphs`, unless it is another way."""
        self.record = record or CudaGraphs()
        self._of: weakref.WeakKeyDictionary[SlotCache, dict[tuple[int, int | None], Window]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, cache: SlotCache, layout: Layout, tap: int | None = None) -> Window | None:
        """Where the step is to be computed, if it was wanted before; None if it is the layers' business.

        A recording is for a step's size, and for the layer ``tap`` whose output is wanted too. A step for
        which buffers have to grow has none, nor has any while keys and values are kept in another form than
        attention takes.
        """
        nodes = next((size for size in SIZES if size >= len(layout.positions)), None)
        buffers = cache.buffers()
        room = {buffer.shape[2] for pair in buffers for buffer in pair}
        if nodes is None or len(room) != 1 or layout.total >= min(room):
            return None
        windows = self._of.setdefault(cache, {})
        window = windows.get((nodes, tap))
        if window is None or not window.is_over(buffers):
            window = windows[nodes, tap] = Window(nodes, buffers, cache.first_layer, self.record)
            self._make_room()
        window.wanted += 1
        return window if window.wanted >= WANTED else None

    def _make_room(self) -> None:
        while sum(map(len, self._of.values())) > MOST and len(self._of) > 1:
            del self._of[next(iter(self._of))]


class Window:
    """A recording of ``nodes`` nodes over the buffers of one session, made when it first runs."""

    def __init__(self, nodes: int, buffers: Buffers, first_layer: int, record: Record) -> None:
        self.nodes = nodes
        #: How often a step of that size came.
        self.wanted = 0
        self._buffers = buffers
        self._first_layer = first_layer
        self._record = record
        self._replay: Run | None = None

    def is_over(self, buffers: Buffers) -> bool:
        """Whether these are the buffers that are recorded, or will be."""
        return all(
            mine is its
            for pair, others in zip(self._buffers, buffers, strict=True)
            for mine, its in zip(pair, others, strict=True)
        )

    def run(self, inputs: Inputs, layout: Layout, layers: Layers) -> Outputs:
        """``layers`` over ``inputs`` of ``n`` nodes, whose masks are ``[n, total]``."""
        if self._replay is None:
            self._prepare(inputs)
        if self._copied is not None:  # what the step before put here may still be on its way
            self._copied.synchronize()
        count, last = len(layout.positions), self._buffers[0][0].shape[2] - 1
        rows = torch.full((self.nodes,), last)
        rows[:count] = torch.arange(layout.first_row, layout.total)
        self._rows.fill(rows)
        self._states.fill(inputs.states)
        self._positions.fill(inputs.positions)
        for kind, parts in inputs.rotary.items():
            for place, part in zip(self._rotary[kind], parts, strict=True):
                place.fill(part)
        for window, shown in inputs.masks.items():
            whole = torch.full((self.nodes, last + 1), HIDDEN)
            whole[:count, : layout.total] = shown
            whole[count:, 0] = 0
            self._masks[window].fill(whole[None, None])
        if self._copied is not None:
            self._copied.record()
        if self._replay is None:
            cache = _Whole(self._buffers, self._first_layer, self._rows.there)
            there = Inputs(
                self._states.there,
                self._positions.there,
                {kind: tuple(place.there for place in places) for kind, places in self._rotary.items()},
                {window: place.there for window, place in self._masks.items()},
            )
            self._replay = self._record(lambda: layers(there, cache))
        # The next run, of this recording or of another, may use the same memory.
        return {layer: output[:, :count].clone() for layer, output in self._replay().items()}

    def _prepare(self, inputs: Inputs) -> None:
        """Where the recording will read its inputs."""
        buffer = self._buffers[0][0]
        device, rows = buffer.device, buffer.shape[2]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

        def place(like: torch.Tensor) -> _Place:
            shape = (1, self.nodes, *like.shape[2:])
            return _Place(torch.zeros(shape, dtype=like.dtype, device=device))

        self._rows = _Place(torch.zeros(self.nodes, dtype=torch.long, device=device))
        self._states = place(inputs.states)
        self._positions = place(inputs.positions)
        self._rotary = {kind: [place(part) for part in parts] for kind, parts in inputs.rotary.items()}
        self._masks = {
            window: _Place(torch.zeros(1, 1, self.nodes, rows, dtype=inputs.states.dtype, device=device))
            for window in inputs.masks
        }


class _Place:
    """A tensor that a recording reads, and memory of the host that is copied to it without a detour."""

    def __init__(self, there: torch.Tensor) -> None:
        self.there = there
        self._here: torch.Tensor | None = None
        if there.device.type != "cpu":
            self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.device.type == "cuda")

    def fill(self, values: torch.Tensor) -> None:
        """Put ``values`` there: of as many nodes, which are the second dimension, or fewer."""
        fewer = values.dim() > 1 and values.shape[1] < self.there.shape[1]
        there = self.there[:, : values.shape[1]] if fewer else self.there
        if self._here is None or values.device == there.device:
            there.copy_(values)
            return
        here = self._here[:, : values.shape[1]] if fewer else self._here
        here.copy_(values)
        there.copy_(here, non_blocking=True)


class _Whole:
    """A session's cache as recorded layers see it: the same buffers every time, whole."""

    def __init__(self, buffers: Buffers, first_layer: int, rows: torch.Tensor) -> None:
        self._buffers = buffers
        self._first_layer = first_layer
        self._rows = rows  # [n], where the nodes' keys and values go

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, H, n, head_dim]``; return all rows that there is room for."""
        pair = self._buffers[layer_idx - self._first_layer]
        for buffer, new in zip(pair, (keys, values), strict=True):
            buffer.index_copy_(2, self._rows, new)
        return pair
