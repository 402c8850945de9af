"""The model under audit: all of its layers, in pieces between the cuts that are looked at.

Assumptions: the whole model is on this machine, as it is on that of an attacker who downloaded it.
Cost: memory of one copy of the model, in the precision that the device computes in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch

from aparte.config import Cut
from aparte.model.cache import SlotCache
from aparte.model.parts import Blueprint, Progress
from aparte.model.stage import Stage
from aparte.step import ROOT, Step

#: Nodes per forward pass over a corpus; more gain nothing on a CPU, and attention costs their square.
PACK = 512
#: Room for branches below the committed path in a run's caches.
PENDING = 65_536


class Run:
    """A run of layers with its caches: one session of a stage, through however many pieces."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._parts: list[tuple[Stage, SlotCache]] = [(stage, stage.new_cache(PENDING)) for stage in stages]

    def forward(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, D] -> [n, D]``; no layer at all gives back what came in."""
        for stage, cache in self._parts:
            hidden = stage.forward(cache, step, hidden)
        return hidden


class Specimen:
    """Embedding, layers and head of one model; whoever holds it can play the device and the cloud."""

    def __init__(self, blueprint: Blueprint, bounds: Iterable[int], progress: Progress | None = None) -> None:
        """``bounds`` are the layers at which runs may begin or end, besides the first and the last."""
        self.blueprint = blueprint
        places = sorted({0, blueprint.layers, *bounds})
        self._stages = {}
        for start, stop in pairwise(places):
            self._stages[start, stop] = blueprint.stage(range(start, stop))
            if progress:
                progress("loading the model", stop, blueprint.layers)
        self.embedding, self.head = blueprint.ends()

    @property
    def layers(self) -> int:
        return self.blueprint.layers

    @property
    def vocab_size(self) -> int:
        return self.blueprint.vocab_size

    @property
    def width(self) -> int:
        """The hidden size ``D``."""
        return self.blueprint.hidden_size

    @property
    def first_layers(self) -> range:
        """The first run of layers that has bounds at both ends."""
        return range(*min(self._stages))

    def run(self, layers: range) -> Run:
        """A new run of these layers, which must begin and end at bounds."""
        stages = [
            stage
            for (start, stop), stage in self._stages.items()
            if layers.start <= start < stop <= layers.stop
        ]
        if sum(len(stage.layer_indices) for stage in stages) != len(layers):
            raise ValueError(f"layers {layers} do not begin and end at bounds of the specimen")
        return Run(stages)

    def front(self, cut: Cut) -> Run:
        """Layers of the device before the middle."""
        return self.run(range(cut.front))

    def middle(self, cut: Cut) -> Run:
        """Layers of the cloud."""
        return self.run(cut.middle(self.layers))

    def back(self, cut: Cut) -> Run:
        """Layers of the device behind the middle."""
        return self.run(range(self.layers - cut.back, self.layers))

    def changed(self, change: Callable[[str, torch.Tensor], torch.Tensor], cut: Cut) -> Specimen:
        """The same model with changed weights at both ends of ``cut``; the middle is shared."""
        other = copy.copy(self)
        other.blueprint = copy.copy(self.blueprint)
        other.blueprint.change = change
        middle = cut.middle(self.layers)
        other._stages = {
            (start, stop): stage if start in middle else other.blueprint.stage(range(start, stop))
            for (start, stop), stage in self._stages.items()
        }
        return other

    def embeddings(self) -> torch.Tensor:
        """The embedding of every token, ``[V, D]`` in float32."""
        return self.embedding(torch.arange(self.vocab_size)).float().cpu()


def bounds_of(cuts: Iterable[Cut], layers: int) -> set[int]:
    """Where the parts of these cuts begin and end."""
    return {bound for cut in cuts for bound in (cut.front, layers - cut.back)}


def packs(lengths: Sequence[int]) -> list[range]:
    """Which texts go through a stage together: consecutive ones of at most :data:`PACK` tokens, or one."""
    result: list[range] = []
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and total + length > PACK:
            result.append(range(start, index))
            start, total = index, 0
        total += length
    return [*result, range(start, len(lengths))] if len(lengths) else []


def side_by_side(lengths: Sequence[int]) -> Step:
    """A first step of several chains below the root: texts that do not see each other."""
    parents: list[int] = []
    for length in lengths:
        parents.append(ROOT)
        parents.extend(range(len(parents) - 1, len(parents) + length - 2))
    return Step(1, 0, ROOT, 0, tuple(parents))
