"""Stages: a contiguous run of decoder layers over a token tree.

The layers are those of Hugging Face ``transformers``; this module derives from a
:class:`~aparte.step.Step` what they need: positions, rotary embeddings and one explicit attention mask
per kind of layer (paper A, section 4.2, has the client send these; here they never cross the wire).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aparte.config import KvName
from aparte.errors import SlotError
from aparte.model import attention
from aparte.model.cache import SlotCache
from aparte.model.invariant import Visible
from aparte.model.ragged import SharedCache
from aparte.model.slab import Slab
from aparte.model.tree import Layout
from aparte.step import Step


@dataclass(frozen=True)
class Item:
    """One session's share of a forward pass: its step over its cache, with ``hidden`` ``[n, D]``.

    ``tap`` is a layer of the model whose output is wanted as well.
    """

    cache: SlotCache
    step: Step
    hidden: torch.Tensor
    tap: int | None = None


@dataclass(frozen=True)
class Output:
    """What the last layer made of an item, ``[n, D]``, and the layer that its ``tap`` names."""

    hidden: torch.Tensor
    tapped: torch.Tensor | None = None


@dataclass(frozen=True)
class _Inputs:
    """What the layers are given, of one session or of several."""

    states: torch.Tensor  # [1, n, D]
    positions: torch.Tensor  # [1, n]
    rotary: Mapping[str | None, tuple[torch.Tensor, ...]]  # cosines and sines, [1, n, head_dim], by kind
    masks: Mapping[int | None, Any]  # by sliding window


class Stage:
    """Decoder layers ``first_layer ..`` with their rotary embedding; caches are per session."""

    def __init__(
        self,
        layers: nn.ModuleList,
        rotary: nn.Module,
        *,
        first_layer: int,
        windows: tuple[int | None, ...],
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        rotary_kinds: tuple[str, ...] | None = None,
        rotary_switch: int | None = None,
        cache_name: str = "cache",
        kv: KvName = "model",
        invariant: bool = False,
    ) -> None:
        """``windows[i]`` is the sliding window of the i-th layer of this stage, None for full attention.

        ``rotary_kinds[i]`` is what ``rotary`` calls that layer's kind, in models where it asks; texts of more
        than ``rotary_switch`` tokens, which begin at that slot, get other embeddings from it. Layers take
        their cache as the argument ``cache_name``, which keeps keys and values as ``kv`` says. With
        ``invariant`` the layers' attention takes :class:`~aparte.model.invariant.Visible` as a mask.
        """
        self._layers = layers
        self._rotary = rotary
        self._windows = windows
        self._kinds: tuple[str | None, ...] = rotary_kinds or (None,) * len(layers)
        self.rotary_switch = rotary_switch
        self._cache_name = cache_name
        self._kv: KvName = kv
        self._invariant = invariant
        self._first_layer = first_layer
        self.max_context = max_context
        self.dtype = dtype
        self.device = device
        #: Whether steps of several sessions can share a pass.
        self.shares_passes = all(attention.takes_sessions(layer) for layer in layers)

    @property
    def layer_indices(self) -> range:
        """Which layers of the model these are."""
        return range(self._first_layer, self._first_layer + len(self._layers))

    def part(self, layers: range) -> Stage:
        """Some of the layers, contiguous, as a stage of their own that shares the weights."""
        if not layers or layers.start not in self.layer_indices or layers.stop > self.layer_indices.stop:
            raise ValueError(f"layers {layers} are not among {self.layer_indices}")
        chosen = slice(layers.start - self._first_layer, layers.stop - self._first_layer)
        part = copy.copy(self)
        part._layers = nn.ModuleList(list(self._layers)[chosen])
        part._first_layer = layers.start
        part._windows, part._kinds = self._windows[chosen], self._kinds[chosen]
        return part

    def new_cache(self, max_pending: int = 4096, slab: Slab | None = None) -> SlotCache:
        """An empty cache for one session, for a full context and ``max_pending`` nodes below it.

        Its memory comes from ``slab``, if there is one that sessions share.
        """
        rows = self.max_context + max_pending
        return SlotCache(self._first_layer, len(self._layers), rows, self._kv, slab)

    def forward(self, cache: SlotCache, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layers over the step's nodes: ``[n, D] -> [n, D]``, in this stage's dtype."""
        return self.forward_one(Item(cache, step, hidden)).hidden

    @torch.inference_mode()
    def forward_one(self, item: Item) -> Output:
        """:meth:`forward` for a session that may want the output of another layer, too."""
        try:
            inputs = self._inputs(item)
            outputs = self._run(inputs, item.cache, () if item.tap is None else (item.tap,))
            return self._output(item, outputs, slice(None))
        finally:
            item.cache.end()

    @torch.inference_mode()
    def forward_many(self, items: Sequence[Item]) -> list[Output | Exception]:
        """Run the layers over the steps of different sessions at once, each as if it were alone.

        A step that does not fit its own cache gives the error in its place. An error in the layers is
        raised; then each step can be repeated by itself, because a step may be repeated.
        """
        try:
            return self._forward_many(items)
        finally:
            for item in items:
                item.cache.end()

    def _forward_many(self, items: Sequence[Item]) -> list[Output | Exception]:
        results: dict[int, Output | Exception] = {}
        inputs: dict[int, _Inputs] = {}
        for index, item in enumerate(items):
            try:
                inputs[index] = self._inputs(item)
            except Exception as error:
                results[index] = error
        if inputs:
            rows = [len(items[index].step) for index in inputs]
            cache = SharedCache([items[index].cache for index in inputs], rows)
            taps = {tap for index in inputs if (tap := items[index].tap) is not None}
            outputs = self._run(_joined(list(inputs.values())), cache, taps)
            end = 0
            for index, count in zip(inputs, rows, strict=True):
                end += count
                results[index] = self._output(items[index], outputs, slice(end - count, end))
        return [results[index] for index in range(len(items))]

    def _inputs(self, item: Item) -> _Inputs:
        """Apply the step to the session's cache; what is left to do is what all sessions can share."""
        if item.tap is not None and item.tap not in self.layer_indices:
            raise SlotError(f"Layer {item.tap} is not among those of this stage.")
        layout = item.cache.begin(item.step)
        states = item.hidden.to(self.device, self.dtype).unsqueeze(0)
        positions = torch.tensor([layout.positions], device=self.device)
        long = self._is_long(item.cache, layout)
        return _Inputs(
            states,
            positions,
            # Session by session: some rotary embeddings depend on the longest sequence they are given.
            {kind: self._rotate(states, positions, kind, long) for kind in set(self._kinds)},
            {window: self._mask(layout, positions[0], window) for window in set(self._windows)},
        )

    def _run(
        self, inputs: _Inputs, cache: SlotCache | SharedCache, taps: set[int] | tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        """The outputs, ``[1, n, D]``, of the last layer and of those in ``taps``."""
        states, outputs = inputs.states, {}
        last = self.layer_indices.stop - 1
        more = {"use_cache": True, self._cache_name: cache}
        for index, layer, window, kind in zip(
            self.layer_indices, self._layers, self._windows, self._kinds, strict=True
        ):
            output: Any = layer(
                states,
                attention_mask=inputs.masks[window],
                position_ids=inputs.positions,
                position_embeddings=inputs.rotary[kind],
                **more,
            )
            states = output if isinstance(output, torch.Tensor) else output[0]
            if index == last or index in taps:
                outputs[index] = states
        return outputs

    def _output(self, item: Item, outputs: dict[int, torch.Tensor], rows: slice) -> Output:
        tapped = None if item.tap is None else outputs[item.tap][0, rows]
        return Output(outputs[self.layer_indices.stop - 1][0, rows], tapped)

    def _is_long(self, cache: SlotCache, layout: Layout) -> bool:
        """Whether the text has the rotary embeddings of long ones."""
        switch = self.rotary_switch
        if switch is None or cache.tree.root >= switch:
            return switch is not None
        if max(layout.positions) >= switch:
            raise SlotError(f"A text of more than {switch} tokens has to begin at slot {switch}.")
        return False

    def _rotate(
        self, states: torch.Tensor, positions: torch.Tensor, kind: str | None, long: bool
    ) -> tuple[torch.Tensor, ...]:
        """Cosines and sines, ``[1, n, head_dim]``, at ``positions`` ``[1, n]``."""
        more = {} if kind is None else {"layer_type": kind}
        if long:  # the library decides by the largest position that it sees, so it is shown one
            positions = torch.cat([positions, positions.new_tensor([[self.rotary_switch]])], dim=1)
        rotary: tuple[torch.Tensor, ...] = self._rotary(states, position_ids=positions, **more)
        return tuple(part[:, :-1] for part in rotary) if long else rotary

    def _mask(
        self, layout: Layout, positions: torch.Tensor, window: int | None
    ) -> torch.Tensor | Visible | None:
        """Who sees whom, ``[1, 1, n, total]``, or None if everybody sees everything.

        It is added to the scores: 0 for what a node sees, -inf for the rest. A bool mask would be turned
        into that by every layer anew. A node sees the committed prefix, its ancestors and itself; with a
        sliding window only those closer than ``window`` positions, as ``transformers`` counts too.
        """
        short = window is None or max(layout.positions) < window
        if layout.sees_everything and short and not self._invariant:
            # One node that sees all rows: attention needs no mask. (With several nodes this can't be.)
            return None
        mask = torch.zeros(len(positions), layout.total, dtype=self.dtype, device=self.device)
        hidden = torch.from_numpy(~layout.ancestors).to(self.device)
        mask[:, layout.prefix :].masked_fill_(hidden, float("-inf"))
        if window is not None:
            depths = torch.cat([torch.arange(layout.prefix), torch.from_numpy(layout.pending_depths)]).to(
                self.device
            )
            mask.masked_fill_(depths <= positions[:, None] - window, float("-inf"))
        return Visible(mask) if self._invariant else mask[None, None]


def _joined(inputs: list[_Inputs]) -> _Inputs:
    """The rows of several sessions one after the other; their masks side by side."""
    return _Inputs(
        torch.cat([each.states for each in inputs], dim=1),
        torch.cat([each.positions for each in inputs], dim=1),
        {
            kind: tuple(
                torch.cat(parts, dim=1) for parts in zip(*(each.rotary[kind] for each in inputs), strict=True)
            )
            for kind in inputs[0].rotary
        },
        {window: [each.masks[window] for each in inputs] for window in inputs[0].masks},
    )
