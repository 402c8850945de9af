"""Results of a node that do not depend on the nodes beside it, to the bit (``--batch-invariant``).

A step computes several nodes at once, and libraries choose their kernels by the number of rows: a node may
differ in its last bits from the same node computed alone. That is why sequential and speculative runs are
equal in text but not in every bit of their logits, and why a tie may fall the other way in half precision.
Here every operation that looks at more than one row is given the same shape whatever the step is:

- attention goes node by node, over that node's own history in the order of its positions;
- linears get blocks of a fixed number of rows (8-bit ones need none, because sums of integers are exact).

What is left works on each number by itself, or on each row. The price is measured by ``aparte bench step``,
and whether it holds for a model here is told by ``aparte verify``, which then demands equal logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from aparte.model.linear import Int8Linear, PackedLinear

#: Rows of a block. A step of one node computes as many.
BLOCK = 8


class Visible:
    """Which rows each node of a step sees, instead of a mask."""

    def __init__(self, mask: torch.Tensor) -> None:
        """``mask`` ``[n, total]`` is 0 where a node sees a row, and -inf elsewhere."""
        self._rows = [row.nonzero().flatten() for row in mask == 0]

    def of_each(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values ``[1, H, seen_i, head_dim]`` that each node attends to, parents first."""
        for rows in self._rows:
            # Copies even where the rows lie side by side: a kernel may look at how its input is laid out.
            yield keys.index_select(2, rows), values.index_select(2, rows)


class FixedRows(nn.Module):
    """A linear that always multiplies :data:`BLOCK` rows."""

    def __init__(self, linear: nn.Linear | PackedLinear) -> None:
        super().__init__()
        self._linear = linear
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        rows = x.reshape(-1, self.in_features)
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
        blocks = [self._linear(block) for block in torch.split(padded, BLOCK)]
        result = torch.cat(blocks)[: len(rows)]
        return result.view(*x.shape[:-1], self.out_features)


def fixed_rows(linear: nn.Module) -> nn.Module:
    """``linear`` with fixed shapes, if it isn't exact anyway."""
    needs = isinstance(linear, nn.Linear | PackedLinear) and not isinstance(linear, Int8Linear)
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
