"""Front and back with changes that can be trained, around the teacher's own middle, which cannot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from aparte.bridge.teacher import Teacher, run_layer
from aparte.privatize.ends import Change, Veil


class Changed(nn.Module):
    """A linear layer whose own weight stays, plus a change of it: of low rank, or full (``rank`` 0)."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        size, device = (base.out_features, base.in_features), base.weight.device
        self.down: nn.Parameter | None = None
        if rank:
            down = torch.randn(rank, size[1], generator=generator) * size[1] ** -0.5
            self.down = nn.Parameter(down.to(device))
            size = (size[0], rank)
        # Nothing is changed before something is learned.
        self.up = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., I] -> [..., O]``."""
        inner = x.float() if self.down is None else nn.functional.linear(x.float(), self.down)
        result: torch.Tensor = self.base(x) + nn.functional.linear(inner, self.up).to(x.dtype)
        return result


class Passed(NamedTuple):
    """What goes up, what comes down, and the head's input: ``[B, T, D]`` each."""

    sent: torch.Tensor
    down: torch.Tensor
    final: torch.Tensor


class EndsNet(nn.Module):
    """The device's layers of ``teacher`` with changes; what goes up, and what becomes of what comes down."""

    def __init__(self, teacher: Teacher, prefixes: Sequence[str], rank: int, seed: int) -> None:
        """``prefixes`` begin the names of each layer's tensors; ``seed`` is of the changes' first values."""
        super().__init__()
        # Not a child: its weights are nobody's to train or to save.
        self._teacher = [teacher]
        self._prefixes = prefixes
        generator = torch.Generator().manual_seed(seed)
        self.ends = nn.ModuleDict()
        middle = teacher.middle
        for index in (*range(middle.start), *range(middle.stop, len(teacher.layers))):
            layer = copy.deepcopy(teacher.layers[index])
            for name, module in list(layer.named_modules()):
                if type(module) is nn.Linear:
                    parent, _, child = name.rpartition(".")
                    setattr(layer.get_submodule(parent), child, Changed(module, rank, generator))
            self.ends[str(index)] = layer

    def front(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens ``[B, T]`` to the front's output ``[B, T, D]``, without a mask."""
        teacher = self._teacher[0]
        return self._run(range(teacher.middle.start), teacher.embed(tokens))

    def middle(self, sent: torch.Tensor) -> torch.Tensor:
        """What the cloud makes of what is sent, ``[B, T, D] -> [B, T, D]``."""
        teacher = self._teacher[0]
        return run(teacher, teacher.layers, teacher.middle, sent)

    def final(self, down: torch.Tensor) -> torch.Tensor:
        """What comes down, without its mask, to the head's input ``[B, T, D]``."""
        teacher = self._teacher[0]
        result: torch.Tensor = teacher.norm(self._run(range(teacher.middle.stop, len(teacher.layers)), down))
        return result

    def sent(self, tokens: torch.Tensor, veil: Veil, values: torch.Tensor) -> torch.Tensor:
        """Tokens ``[B, T]`` and decoys' coordinates ``[B, T, n]`` to what goes up, in float32."""
        return torch.add(*self._masked(tokens, veil, values))

    def forward(self, tokens: torch.Tensor, veil: Veil, values: torch.Tensor) -> Passed:
        """The whole way."""
        front, mask = self._masked(tokens, veil, values)
        sent = front + mask
        dtype = self._teacher[0].dtype
        down = self.middle(sent.to(dtype))
        return Passed(sent, down, self.final((down.float() - mask).to(dtype)))

    def _masked(
        self, tokens: torch.Tensor, veil: Veil, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        front = self.front(tokens).float()
        mask = veil.mask(front, values)
        # The first token of a text is sent as it is.
        return front, torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)

    def trained(self) -> dict[str, nn.Parameter]:
        """What training changes, by name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def changes(self) -> dict[str, Change]:
        """The changes by the names of the tensors that they change."""
        found = {}
        for index, layer in self.ends.items():
            for name, module in layer.named_modules():
                if isinstance(module, Changed):
                    down = None if module.down is None else module.down.detach().float().cpu()
                    change = Change(module.up.detach().float().cpu(), down)
                    found[f"{self._prefixes[int(index)]}{name}.weight"] = change
        return found

    def _run(self, layers: range, hidden: torch.Tensor) -> torch.Tensor:
        return run(self._teacher[0], self.ends, layers, hidden)


def run(
    teacher: Teacher, layers: nn.ModuleList | nn.ModuleDict, indices: range, hidden: torch.Tensor
) -> torch.Tensor:
    """Whole sequences ``[B, T, D]`` through the ``layers`` at ``indices``, from left to right."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    rotary = teacher.rotary(hidden, position_ids=positions)
    for index in indices:
        layer = layers[str(index)] if isinstance(layers, nn.ModuleDict) else layers[index]
        hidden = run_layer(layer, hidden, None, positions, rotary, None)
    return hidden
