"""Front and back with changes that can be trained, around the teacher's own middle, which cannot."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from aparte.bridge.teacher import Teacher, run_layer
from aparte.privatize.ends import Change


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

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[B, T]`` and masks ``[B, T, D]`` to the front's output and the head's input."""
        front = self.front(tokens)
        dtype = front.dtype
        middle = self.middle((front.float() + mask).to(dtype))
        return front, self.final((middle.float() - mask).to(dtype))

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
