"""Fewer and larger operations inside the layers of ``transformers``, with the same results.

A step of a few nodes on a CPU is bound by the number of operations as much as by their size. Three things
are replaced in place, wherever a module has the expected shape, whatever its family; the rest stays:

- packed linears that read the same input (query, key and value; gate and up) become one over their rows,
  and the gated feed-forward around the latter one module;
- root-mean-square norms become four operations instead of eight (six in bfloat16);
- attention shares keys and values among query heads (:mod:`aparte.model.attention`).

Numbers: a packed linear computes each of its outputs by itself, so the first is exact to the bit, and so
is the third. The second takes its steps in another order and differs by float32 rounding (in bfloat16 it
rounds once, at its end, where the library rounds twice).
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from aparte.model import attention
from aparte.model.linear import PACKED, Linears, PackedLinear, packed_linear

#: Children that read the same input, in the order in which attention calls them.
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
#: Children of a gated feed-forward: ``down(act(gate(x)) * up(x))``.
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")


def fuse(layer: nn.Module, linears: Linears) -> None:
    """Do all of it to a loaded decoder layer on a CPU, where it applies; packed ``linears`` are joined."""
    _fuse_norms(layer)
    attention.install(layer, attention.NAME)
    if linears in PACKED:
        _fuse_linears(layer, linears)


def joined(linears: list[nn.Linear], kind: Linears) -> PackedLinear:
    """One packed linear whose outputs are those of ``linears``, one after the other."""
    weights: list[torch.Tensor] = [linear.weight for linear in linears]
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return packed_linear(torch.cat(weights), torch.cat(biases) if biases else None, kind)


class Together(nn.Module):
    """One packed linear in place of several; computes when the first of its parts is asked."""

    def __init__(self, linears: list[nn.Linear], kind: Linears) -> None:
        super().__init__()
        self.widths = [linear.out_features for linear in linears]
        self.linear = joined(linears, kind)
        self._newest: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The output of the ``index``-th linear, ``[..., in_features] -> [..., out_features]``."""
        newest = self._newest  # read once: another thread may be in this layer, and then each computes
        if newest is None or newest[0] is not x:
            newest = self._newest = (x, self.linear(x).split(self.widths, dim=-1))
        if index == len(self.widths) - 1:
            self._newest = None  # keeps no tensor alive
        return newest[1][index]


class Part(nn.Module):
    """What the parent module finds in the place of one of its linears."""

    def __init__(self, together: Together, index: int) -> None:
        super().__init__()
        self.together = together
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        return self.together.part(x, self._index)


class FusedGated(nn.Module):
    """The gated feed-forward ``down(act(gate(x)) * up(x))`` with gate and up in one packed linear."""

    def __init__(
        self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, act: nn.Module, kind: Linears
    ) -> None:
        super().__init__()
        self._gate_up = joined([gate, up], kind)
        self._down = packed_linear(down.weight, down.bias, kind)
        self._act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., D] -> [..., D]``."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = self._down(self._act(gate).mul_(up))
        return result


class FastNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32.

    With ``D`` values that is ``x / hypot(|x|, sqrt(D eps)) * (sqrt(D) weight)``.
    """

    _weight: torch.Tensor
    _floor: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """``weight`` is float32, whatever ``x`` is: a result is of the type of ``x``."""
        super().__init__()
        root = math.sqrt(weight.numel())
        self.register_buffer("_weight", weight.detach() * root, persistent=False)
        self.register_buffer("_floor", torch.tensor(root * math.sqrt(eps)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., D] -> [..., D]``."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return x.div(torch.hypot(length, self._floor)).mul_(self._weight).to(x.dtype)


def fast_norm(module: nn.Module) -> nn.Module:
    """The same norm in fewer operations; ``module`` itself if it isn't one, by its shape and its results."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return module
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return module
    fast = FastNorm(weight.float(), eps)
    # Norms of other families may look alike and do something else (add one to the weight, say).
    probe = torch.linspace(-3, 5, 2 * weight.numel()).view(2, -1)
    with torch.inference_mode():
        same = torch.allclose(copy.deepcopy(module).float()(probe), fast(probe), atol=1e-5, rtol=1e-4)
    return fast if same else module


def _fuse_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if (fast := fast_norm(child)) is not child:
            setattr(module, name, fast)
        else:
            _fuse_norms(child)


def _fuse_linears(module: nn.Module, kind: Linears) -> None:
    for name, child in module.named_children():
        if (gated := _fused_gated(child, kind)) is not None:
            setattr(module, name, gated)
        else:
            _fuse_linears(child, kind)
    linears = _plain(module, PROJECTIONS)
    if linears is not None:
        together = Together(linears, kind)
        for index, name in enumerate(PROJECTIONS):
            setattr(module, name, Part(together, index))


def _fused_gated(module: nn.Module, kind: Linears) -> FusedGated | None:
    """None if ``module`` is something else than such a feed-forward, by its shape or by its results."""
    if sorted(name for name, _ in module.named_children()) != sorted(GATED):
        return None
    gate_up, down = _plain(module, GATED[:2]), _plain(module, GATED[2:3])
    if gate_up is None or down is None or gate_up[0].out_features != gate_up[1].out_features:
        return None
    act = module.get_submodule("act_fn")
    # Whether it does that with these children, and nothing else. The weights are still as they were stored.
    probe = torch.linspace(-1, 1, 2 * gate_up[0].in_features).view(2, -1).to(gate_up[0].weight.dtype)
    with torch.inference_mode():
        expected, got = module(probe), down[0](act(gate_up[0](probe)) * gate_up[1](probe))
    if not torch.equal(expected, got):
        return None
    return FusedGated(gate_up[0], gate_up[1], down[0], act, kind)


def _plain(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    """Those children of ``module``, if all are plain linears of one input, with biases or without."""
    children = [getattr(module, name, None) for name in names]
    linears = [child for child in children if type(child) is nn.Linear]
    alike = {(linear.in_features, linear.bias is None) for linear in linears}
    return linears if len(linears) == len(names) and len(alike) == 1 else None
