"""The names under which checkpoints keep a model's tensors.

They are mostly those of the model itself. Some families' checkpoints still have older names, and models with
experts keep the matrices of all of them in one tensor while their checkpoints have one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from aparte.model.checkpoint import Checkpoint
from aparte.model.families import Family

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


class Naming:
    """From the names of a model's tensors to those in a checkpoint of its family."""

    def __init__(self, family: Family, shapes: Mapping[str, torch.Size], checkpoint: Checkpoint) -> None:
        """``shapes`` are those of the model's tensors, by name."""
        self._family = family
        self._shapes = shapes
        self._checkpoint = checkpoint
        self._present = checkpoint.names()

    def stored(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names in the checkpoint of everything that the tensors ``names`` are made of."""
        return tuple(piece for name in names for piece in self._pieces(name))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The model's tensors ``names``."""
        pieces = {name: self._pieces(name) for name in names}
        found = self._checkpoint.read(piece for own in pieces.values() for piece in own)
        return {name: self._made(name, [found[piece] for piece in own]) for name, own in pieces.items()}

    def _pieces(self, name: str) -> list[str]:
        if name in self._present:
            return [name]
        stored = name
        for ours, theirs in self._family.stored_as:
            stored = stored.replace(ours, theirs)
        gate, up, down = self._family.experts
        for ending, parts in ((_GATE_UP, (gate, up)), (_DOWN, (down,))):
            if name.endswith(ending):
                stem = stored.removesuffix(ending)
                experts = range(self._shapes[name][0])
                return [f"{stem}.experts.{expert}.{part}.weight" for expert in experts for part in parts]
        return [stored if stored in self._present or not self._present else name]

    @staticmethod
    def _made(name: str, pieces: list[torch.Tensor]) -> torch.Tensor:
        """``[E, 2 I, D]`` from gate and up of each expert, ``[E, D, I]`` from down, else the only piece."""
        if not name.endswith((_GATE_UP, _DOWN)) or pieces[0].ndim == 3:
            return pieces[0]
        if name.endswith(_DOWN):
            return torch.stack(pieces)
        return torch.stack([torch.cat(pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)])
