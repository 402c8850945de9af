"""Results of a node that do not depend on the nodes beside it, to the bit (``--batch-invariant``).

A step computes several nodes at once, and libraries choose their kernels by the number of rows: a node may
differ in its last bits from the same node computed alone. That is why sequential and speculative runs are
equal in text but not in every bit of their logits, and why a tie may fall the other way in half precision.
Here every operation that looks at more than one row is given the same shape whatever the step is:

- attention goes node by node, over that node's own history in the order of its positions (on a CPU for many
  nodes at once, by :mod:`aparte.model.together`);
- linears get blocks of as many rows as a trial shows to be alike when they are loaded: any number up to a
  limit, a fixed one, or one. Those in 8 bits take any, because sums of integers are exact.

What is left works on each number by itself, or on each row. The price is measured by ``aparte bench step``,
and whether it holds for a model here is told by ``aparte verify``, which then demands equal logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from aparte.model.alike import block_rows
from aparte.model.bits import BitsLinear, GpuInt8Linear
from aparte.model.linear import Int8Linear, PackedLinear
from aparte.model.together import Past, Rooms, Together

#: So many nodes may look at two older parts each, which takes less than going twice.
FEW = 32
#: Most nodes that attend together: newer parts are copied out for each.
MOST = 64


class Visible:
    """Which rows each node of a step sees, instead of a mask, and attention that goes by it."""

    def __init__(self, mask: torch.Tensor) -> None:
        """``mask`` ``[n, total]`` is 0 where a node sees a row, and -inf elsewhere."""
        seen = (mask == 0).cpu().numpy()
        self._rows = np.split(np.nonzero(seen)[1], np.cumsum(seen.sum(1))[:-1])
        self._dtype = mask.dtype

    def of_each(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values ``[1, H, seen_i, head_dim]`` that each node attends to, parents first."""
        for rows in self._rows:
            places = torch.from_numpy(rows).to(keys.device)
            # Copies even where the rows lie side by side: a kernel may look at how its input is laid out.
            yield keys.index_select(2, places), values.index_select(2, places)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """On a CPU: ``query`` ``[1, H, n, hd]``, ``key`` and ``value`` ``[1, kv, total, hd]``; returns
        ``[1, n, H, hd]``."""
        if len(self._groups) == 1:
            return self._groups[0][1].attend(query, key, value, scaling)
        result = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for nodes, together in self._groups:
            result[:, nodes] = together.attend(query[:, :, nodes], key, value, scaling)
        return result

    @functools.cached_property
    def _groups(self) -> list[tuple[list[int], Together]]:
        """Nodes that attend together: those that see the same older rows, or all of few that see two."""
        pasts, rooms = [Past.of(rows) for rows in self._rows], Rooms()
        olders, heights = {past.older for past in pasts}, {past.height for past in pasts}
        if len(pasts) <= FEW and len(olders) <= 2 and len(heights) == 1:
            return [(list(range(len(pasts))), Together(pasts, self._dtype, rooms))]
        alike: dict[tuple[int, ...], list[int]] = {}
        for node, past in enumerate(pasts):
            alike.setdefault(past.older, []).append(node)
        return [
            (nodes, Together([pasts[node] for node in nodes], self._dtype, rooms))
            for group in alike.values()
            for nodes in (group[start : start + MOST] for start in range(0, len(group), MOST))
        ]


class FixedRows(nn.Module):
    """A linear that always multiplies the same number of rows, or one of several that are the same to it."""

    def __init__(self, linear: nn.Linear | PackedLinear | BitsLinear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        #: Rows of a block, at least and at most.
        self.least, self.most = block_rows(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        if self.least <= x.numel() // self.in_features <= self.most:
            return self.linear(x)  # type: ignore[no-any-return]
        rows = x.reshape(-1, self.in_features)
        blocks = [self._block(block) for block in rows.split(self.most)]  # type: ignore[no-untyped-call]
        result = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return result.view(*x.shape[:-1], self.out_features)

    def _block(self, rows: torch.Tensor) -> torch.Tensor:
        missing = self.least - len(rows)
        if missing <= 0:
            return self.linear(rows)  # type: ignore[no-any-return]
        result: torch.Tensor = self.linear(nn.functional.pad(rows, (0, 0, 0, missing)))
        return result[: len(rows)]


def fixed_rows(linear: nn.Module) -> nn.Module:
    """``linear`` with fixed shapes, if it isn't exact anyway."""
    exact = isinstance(linear, Int8Linear | GpuInt8Linear)
    needs = isinstance(linear, nn.Linear | PackedLinear | BitsLinear) and not exact
    return FixedRows(linear) if needs else linear  # type: ignore[arg-type]


def fix_rows(module: nn.Module) -> None:
    """Give every linear below ``module`` fixed shapes, in place."""
    for name, child in module.named_children():
        if isinstance(child, FixedRows):
            continue
        if (fixed := fixed_rows(child)) is not child:
            setattr(module, name, fixed)
        else:
            fix_rows(child)
