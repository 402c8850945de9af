"""Stages: a contiguous run of decoder layers over a token tree.

The layers are those of Hugging Face ``transformers``; this module derives from a
:class:`~aparte.step.Step` what they need: positions, rotary embeddings and one explicit attention mask
per kind of layer (paper A, section 4.2, has the client send these; here they never cross the wire).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aparte.config import KvName
from aparte.errors import SlotError
from aparte.model import attention
from aparte.model.cache import SlotCache
from aparte.model.inputs import Inputs, joined, mask, sees_all
from aparte.model.invariant import Visible
from aparte.model.paths import Paths, worthwhile
from aparte.model.ragged import SharedCache
from aparte.model.slab import Slab
from aparte.model.tree import Layout
from aparte.model.windows import Windows
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
        recordings: Windows | None = None,
    ) -> None:
        """``windows[i]`` is the sliding window of the i-th layer of this stage, None for full attention.

        ``rotary_kinds[i]`` is what ``rotary`` calls that layer's kind, in models where it asks; texts of more
        than ``rotary_switch`` tokens, which begin at that slot, get other embeddings from it. Layers take
        their cache as the argument ``cache_name``, which keeps keys and values as ``kv`` says. With
        ``invariant`` the layers' attention takes :class:`~aparte.model.invariant.Visible` as a mask. Steps
        of few nodes are recorded if there are ``recordings``.
        """
        self._layers = layers
        self._rotary = rotary
        self._windows = windows
        self._kinds: tuple[str | None, ...] = rotary_kinds or (None,) * len(layers)
        self.rotary_switch = rotary_switch
        self._cache_name = cache_name
        self._kv: KvName = kv
        self._invariant = invariant
        self.recordings = recordings
        self._first_layer = first_layer
        self.max_context = max_context
        self.dtype = dtype
        self.device = device
        #: Whether steps of several sessions can share a pass.
        self.shares_passes = all(attention.takes_sessions(layer) for layer in layers)
        self._walks = kv in ("model", "int8") and all(
            getattr(layer, "walks_paths", False) for layer in layers
        )

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
        part.recordings = self.recordings and Windows(self.recordings.record)
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
            layout = self._begin(item)
            taps = () if item.tap is None else (item.tap,)
            window = self.recordings and self.recordings.find(item.cache, layout, item.tap)
            if window:
                layers = functools.partial(self._run, taps=taps)
                outputs = window.run(self._staged(item, layout), layout, layers)
            else:
                outputs = self._run(self._inputs(item, layout), item.cache, taps)
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
        inputs: dict[int, Inputs] = {}
        for index, item in enumerate(items):
            try:
                inputs[index] = self._inputs(item, self._begin(item))
            except Exception as error:
                results[index] = error
        if inputs:
            rows = [len(items[index].step) for index in inputs]
            cache = SharedCache([items[index].cache for index in inputs], rows)
            taps = {tap for index in inputs if (tap := items[index].tap) is not None}
            outputs = self._run(joined(list(inputs.values())), cache, taps)
            end = 0
            for index, count in zip(inputs, rows, strict=True):
                end += count
                results[index] = self._output(items[index], outputs, slice(end - count, end))
        return [results[index] for index in range(len(items))]

    def _begin(self, item: Item) -> Layout:
        """Apply the step to the session's cache; what is left to do is what all sessions can share."""
        if item.tap is not None and item.tap not in self.layer_indices:
            raise SlotError(f"Layer {item.tap} is not among those of this stage.")
        return item.cache.begin(item.step)

    def _inputs(self, item: Item, layout: Layout) -> Inputs:
        states = item.hidden.to(self.device, self.dtype).unsqueeze(0)
        positions = torch.tensor([layout.positions], device=self.device)
        return Inputs(states, positions, self._rotaries(item, layout, positions), self._masks(layout))

    def _staged(self, item: Item, layout: Layout) -> Inputs:
        """What a recording copies to its own places: states and masks from wherever they are."""
        positions = torch.tensor([layout.positions], device=self.device)
        host = torch.device("cpu")
        return Inputs(
            item.hidden.to(self.dtype).unsqueeze(0),
            positions,
            self._rotaries(item, layout, positions),
            {window: mask(layout, window, self.dtype, host) for window in set(self._windows)},
        )

    def _rotaries(
        self, item: Item, layout: Layout, positions: torch.Tensor
    ) -> dict[str | None, tuple[torch.Tensor, ...]]:
        """By kind; session by session, as some depend on the longest sequence they are given."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        long = self._is_long(item.cache, layout)
        return {kind: self._rotate(like, positions, kind, long) for kind in set(self._kinds)}

    def _run(self, inputs: Inputs, cache: Any, taps: set[int] | tuple[int, ...]) -> dict[int, torch.Tensor]:
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
        self, like: torch.Tensor, positions: torch.Tensor, kind: str | None, long: bool
    ) -> tuple[torch.Tensor, ...]:
        """Cosines and sines, ``[1, n, head_dim]``, at ``positions`` ``[1, n]``, of the type of ``like``."""
        more = {} if kind is None else {"layer_type": kind}
        if long:  # the library decides by the largest position that it sees, so it is shown one
            positions = torch.cat([positions, positions.new_tensor([[self.rotary_switch]])], dim=1)
        rotary: tuple[torch.Tensor, ...] = self._rotary(like, position_ids=positions, **more)
        return tuple(part[:, :-1] for part in rotary) if long else rotary

    def _masks(self, layout: Layout) -> dict[int | None, Any]:
        """By sliding window: ``[1, 1, n, total]``, or what attention takes instead; None if it needs none."""
        shown: dict[int | None, Any] = {}
        for window in set(self._windows):
            # What a node finds on its path does not depend on other nodes, so invariant steps always walk.
            if self._walks and window is None and (self._invariant or worthwhile(layout)):
                shown[window] = Paths(layout)
                continue
            if not self._invariant and sees_all(layout, window):
                shown[window] = None
                continue
            added = mask(layout, window, self.dtype, self.device)
            shown[window] = Visible(added) if self._invariant else added[None, None]
        return shown
