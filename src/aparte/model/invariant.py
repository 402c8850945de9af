"""Results of a node that do not depend on the nodes beside it, to the bit (``--batch-invariant``).

A step computes several nodes at once, and libraries choose their kernels by the number of rows: a node may
differ in its last bits from the same node computed alone. That is why sequential and speculative runs are
equal in text but not in every bit of their logits, and why a tie may fall the other way in half precision.
Here every operation that looks at more than one row is given the same shape whatever the step is:

- attention goes node by node, over that node's own history in the order of its positions (on a CPU in calls
  for many nodes at once, each a batch of its own);
- linears get blocks of a fixed number of rows (8-bit ones need none, because sums of integers are exact).

What is left works on each number by itself, or on each row. The price is measured by ``aparte bench step``,
and whether it holds for a model here is told by ``aparte verify``, which then demands equal logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from aparte.model.bits import BitsLinear, GpuInt8Linear
from aparte.model.linear import TILE, Bfloat16Linear, Int8Linear, PackedLinear
from aparte.model.pieces import weighted

#: Rows of a block. A step of one node computes as many.
BLOCK = 8
#: What a node sees is cut at multiples of this.
STRIDE = 32
#: Rows of the newer part: more than any has.
TAIL = 2 * STRIDE
#: Most nodes whose newer parts are copied out at a time.
TOGETHER = 64
#: A multiple of the numbers that processors compute at a time.
VECTOR = 32
#: Rows of a query are filled up to a multiple of this. Each thread of the kernel has a share of one buffer,
#: as large as the rows need, and the library that multiplies may go another way where it is not aligned.
ROWS = 8


class Visible:
    """Which rows each node of a step sees, instead of a mask, and attention that goes by it.

    A node's past is cut in two at a place that depends on its length alone. The older part lies in the cache
    as it is, row by row, and nodes that are cut at the same place look at it together, each as a batch of its
    own. The newer part, in which the nodes of a tree differ, is copied out for each, in the order of its
    positions, and filled up to :data:`TAIL` rows. So every node is computed in calls whose shapes do not
    depend on the step, but for the number of batches.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        """``mask`` ``[n, total]`` is 0 where a node sees a row, and -inf elsewhere."""
        self._rows = [row.nonzero().flatten() for row in mask == 0]
        self._dtype = mask.dtype

    def of_each(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values ``[1, H, seen_i, head_dim]`` that each node attends to, parents first."""
        for rows in self._rows:
            # Copies even where the rows lie side by side: a kernel may look at how its input is laid out.
            yield keys.index_select(2, rows), values.index_select(2, rows)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """On a CPU: ``query`` ``[1, H, n, hd]``, ``key`` and ``value`` ``[1, kv, total, hd]``; returns
        ``[1, n, H, hd]``."""
        parts = zip(self._parts, query.split(TOGETHER, dim=2), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat([part.attend(nodes, key, value, scaling) for part, nodes in parts], dim=1)

    @functools.cached_property
    def _parts(self) -> list[_Part]:
        count = range(0, len(self._rows), TOGETHER)
        return [_Part(self._rows[start : start + TOGETHER], self._dtype) for start in count]


class _Part:
    """Some of a step's nodes on a CPU: where the past of each is cut, and attention that goes by it."""

    def __init__(self, seen: list[torch.Tensor], dtype: torch.dtype) -> None:
        """``seen`` are the rows that each node sees, by increasing position."""
        self._older: dict[tuple[int, ...], list[int]] = {}  # nodes by the older rows that they see
        self._fill = torch.zeros(len(seen), 1, 1, TAIL, dtype=dtype)
        newer = []
        for node, rows in enumerate(seen):
            cut = max(0, len(rows) // STRIDE - 1) * STRIDE
            if cut:
                first, last = int(rows[0]), int(rows[cut - 1])
                side_by_side = last - first == cut - 1
                key = (first, last + 1) if side_by_side else tuple(rows[:cut].tolist())
                self._older.setdefault(key, []).append(node)
            rest = len(rows) - cut
            newer += [rows[cut:], rows[-1:].expand(TAIL - rest)]
            self._fill[node, ..., rest:] = float("-inf")
        self._newer = torch.cat(newer)
        self._found: dict[tuple[int, int], torch.Tensor] = {}  # see _places

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """As :meth:`Visible.attend`, of these nodes."""
        _, heads, nodes, size = query.shape
        shared = key.shape[1]
        # Nodes are batches, and heads that share keys rows of one query.
        queries = query[0].view(shared, -1, nodes, size).permute(2, 0, 1, 3)
        # Filled up, which makes it contiguous too: a kernel may look at how its input is laid out.
        queries = nn.functional.pad(queries, (0, 0, 0, -queries.shape[2] % ROWS))
        result, weight = _weighted(queries, self._copied(key), self._copied(value), self._fill, scaling)
        for rows, group in self._older.items():
            together = slice(None) if len(group) == nodes else torch.tensor(group)
            keys, values = (_older(whole, rows).expand(len(group), -1, -1, -1) for whole in (key, value))
            before, its_weight = _weighted(queries[together], keys, values, None, scaling)
            share = _share(its_weight, weight[together]).unsqueeze(-1).to(before.dtype)
            result[together] = before * share + result[together] * (1 - share)
        return result[:, :, : heads // shared].reshape(1, nodes, heads, size)

    def _copied(self, whole: torch.Tensor) -> torch.Tensor:
        """The newer rows of each node: ``[1, kv, total, hd] -> [n, kv, TAIL, hd]``, contiguous."""
        _, shared, total, size = whole.shape
        apart, *inner = whole.stride()[1:]
        if inner != [size, 1] or apart % size:
            whole, apart = whole.contiguous(), total * size
        # As rows of one matrix, whose heads lie ``apart``: they are copied three times as fast.
        rows = whole.as_strided(((shared - 1) * (apart // size) + total, size), (size, 1))
        copied = rows.index_select(0, self._places(shared, apart // size))
        return copied.view(-1, shared, TAIL, size)

    def _places(self, shared: int, apart: int) -> torch.Tensor:
        """Where the newer rows lie in a matrix of ``shared`` heads' rows, the heads ``apart``."""
        if (shared, apart) not in self._found:
            heads = torch.arange(shared).view(1, -1, 1) * apart
            self._found[shared, apart] = (self._newer.view(-1, 1, TAIL) + heads).flatten()
        return self._found[shared, apart]


def _weighted(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`weighted`, never of a single piece of work: its products alone would use several threads."""
    alone = query.shape[0] * query.shape[1] == 1
    if alone:
        query, key, value = (whole.expand(2, -1, -1, -1) for whole in (query, key, value))
        mask = None if mask is None else mask.expand(2, -1, -1, -1)
    result, weights = weighted(query, key, value, mask, scaling)
    return (result[:1], weights[:1]) if alone else (result, weights)


def _older(whole: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """``[1, kv, total, hd]`` cut to ``rows``: from and up to, or each by itself."""
    return whole[:, :, rows[0] : rows[1]] if len(rows) == 2 else whole[:, :, list(rows)]


def _share(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``exp(one) / (exp(one) + exp(other))`` of ``[n, kv, rows]``.

    Filled up, because the exponential of a vector's worth of numbers and that of one differ in the last bit.
    """
    apart = (one - other).flatten(1)
    width = apart.shape[1]
    filled = nn.functional.pad(apart, (0, -width % VECTOR)).sigmoid()
    return filled[:, :width].view_as(one)


class FixedRows(nn.Module):
    """A linear that always multiplies the same number of rows."""

    def __init__(self, linear: nn.Linear | PackedLinear | BitsLinear) -> None:
        super().__init__()
        self.linear = linear
        self._rows = TILE if isinstance(linear, Bfloat16Linear) else BLOCK
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        rows = x.reshape(-1, self.in_features)
        missing = -len(rows) % self._rows
        padded = nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()
        blocks = [self.linear(block) for block in torch.split(padded, self._rows)]
        result = (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[: len(rows)]
        return result.view(*x.shape[:-1], self.out_features)


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
