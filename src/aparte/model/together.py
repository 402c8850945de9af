"""Attention of several nodes on a CPU in which each gets the numbers that it would get alone, to the bit.

A node's past is cut in two at a place that depends on its length alone. The older part lies in the cache as
it is, row by row. Nodes that are cut at the same place look at it together, as rows of blocks of one size, or
each in a block of its own where a trial finds that places in a block are not alike. The newer part, in which
the nodes of a tree differ, is copied out for each, in the order of its positions, and filled up to
:data:`TAIL` rows. So every node is computed in calls whose shapes do not depend on the step, but for the
number of batches.

Between operations of this size a processor spends as long as in them, so there are few: queries are laid out
once, for both parts, and both results lie alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from aparte.model.alike import queries_alike
from aparte.model.pieces import weighted

#: What a node sees is cut at multiples of this.
STRIDE = 32
#: Rows of the newer part: more than any has.
TAIL = 2 * STRIDE
#: Least rows of a query. Each thread of the kernel has a share of one buffer, as large as the rows need, and
#: the library that multiplies may go another way where it is not aligned.
ROWS = 8
#: Rows of a block of queries to an older part, unless one node has more. The kernel takes as many at a time;
BLOCK_ROWS = 32
#: to older parts from that length on they are fewer, because a node by itself pays for all of them.
LONG, LONG_ROWS = 768, 16
#: A multiple of the numbers that processors compute at a time.
VECTOR = 32


class Past(NamedTuple):
    """What a node sees of a cache, by increasing position."""

    #: Of the older part the first and the end, or each by itself where they do not lie side by side.
    older: tuple[int, ...]
    newer: np.ndarray
    #: Rows of a block that looks at the older part.
    height: int

    @classmethod
    def of(cls, rows: np.ndarray) -> Past:
        """Cut ``rows``."""
        cut = max(0, len(rows) // STRIDE - 1) * STRIDE
        older, newer = rows[:cut], rows[cut:]
        height = BLOCK_ROWS if cut < LONG else LONG_ROWS
        if cut and older[-1] - older[0] == cut - 1:
            return cls((int(older[0]), int(older[-1]) + 1), newer, height)
        return cls(tuple(older.tolist()), newer, height)


class Rooms:
    """Memory for rows that are laid out anew in every layer, by whoever of a step computes at the time."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}

    def of(self, name: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        """``[rows, hd]``, of the type of ``like``. There is one of a name and a size."""
        kind = (name, rows, like.shape[-1], like.dtype)
        if kind not in self._rooms:
            self._rooms[kind] = like.new_empty(rows, like.shape[-1])
        return self._rooms[kind]


class _Plan:
    """Which row goes where, for some shapes."""

    def __init__(
        self,
        newer: np.ndarray,
        which: np.ndarray,
        count: int,
        height: int,
        rooms: Rooms,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> None:
        """``newer`` are the rows of the newer parts, ``[n, 1, TAIL]``; ``which`` of ``count`` older parts is
        each node's; ``height`` are the rows of a block."""
        _, heads, nodes, size = query.shape
        shared = key.shape[1]
        own = heads // shared
        # How many heads there are to a head of the keys, as they are laid out; and rows of queries, which are
        # heads that share keys, to newer and to older parts.
        each = 1 << (own - 1).bit_length()
        row, rows, height = shared * size, max(ROWS, each), max(height, each)
        # Whether nodes share a block. Otherwise all that they share is a call.
        shares = queries_alike(size, query.dtype, height, torch.get_num_threads())
        self.blocks = -(-nodes * each // height) if shares else nodes
        # By node, by head among those that share keys, by head of the keys. Some nodes more: to the newer
        # parts the last may have more rows than its own.
        places = max(self.blocks * height // each if shares else 0, nodes + rows // each)
        spots = np.minimum(np.arange(places), nodes - 1)
        inside = np.arange(shared) * own + np.minimum(np.arange(each), own - 1)[:, None]
        _, apart, next_one, _ = query.stride()
        self.picked = _index((spots[:, None, None] * next_one + inside * apart) // size)
        _, apart, next_one, _ = key.stride()
        self.copied = _index((newer * next_one + np.arange(shared)[:, None] * apart) // size)
        self.queries = rooms.of("queries", len(self.picked), query)
        self.keys, self.values = (rooms.of(name, len(self.copied), key) for name in ("keys", "values"))
        self.copies = [whole.view(nodes, shared, TAIL, size) for whole in (self.keys, self.values)]
        strides = (each * row, size, row, 1)
        self.alone = self.queries.as_strided((nodes, shared, rows, size), strides)
        strides = (height * row, size, row, 1)
        self.in_blocks = (
            self.queries.as_strided((self.blocks, shared, height, size), strides) if shares else self.alone
        )
        #: Of which rows of the blocks each older part is, ``[blocks, 1, rows, 1]``, if there are several.
        owners = spots.repeat(each)[: self.blocks * height] if shares else np.arange(nodes).repeat(rows)
        self.owned = [
            torch.from_numpy(which[owners] == number).view(self.blocks, 1, -1, 1)
            for number in range(count if count > 1 else 0)
        ]
        # Where a node's own rows lie, in what blocks give and in what newer parts give.
        spans = (each if shares else rows, rows)
        self.results = [((nodes, shared, own, size), (span * row, size, row, 1)) for span in spans]
        self.weights = [((nodes, shared, own, 1), (span * shared, 1, shared, 1)) for span in spans]


class Together:
    """Some of a step's nodes, and attention that goes by what each of them sees.

    All look at every older part that one of them sees, so these should be few, and of one height.
    """

    def __init__(self, pasts: list[Past], dtype: torch.dtype, rooms: Rooms) -> None:
        self._rooms = rooms
        numbers: dict[tuple[int, ...], int] = {}
        self._which = np.array([numbers.setdefault(past.older, len(numbers)) for past in pasts])
        self._older = list(numbers)
        self._height = pasts[0].height
        self._newer = np.empty((len(pasts), 1, TAIL), dtype=np.int64)
        fill = np.zeros((len(pasts), 1, 1, TAIL), dtype=np.float32)
        for node, (_, newer, _) in enumerate(pasts):
            self._newer[node, 0, : len(newer)], self._newer[node, 0, len(newer) :] = newer, newer[-1]
            fill[node, ..., len(newer) :] = -np.inf
        self._fill = torch.from_numpy(fill).to(dtype)
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """``query`` ``[1, H, n, hd]``, ``key`` and ``value`` ``[1, kv, total, hd]``; returns
        ``[1, n, H, hd]``."""
        plan = self._plan(query, key, value)
        if plan is None:
            return self.attend(*_regular(query, key, value), scaling)
        # What is selected is contiguous, whatever it comes from: a kernel may look at how its input lies.
        # Rows of a matrix are selected three times as fast as along an inner dimension.
        torch.index_select(_matrix(query), 0, plan.picked, out=plan.queries)
        torch.index_select(_matrix(key), 0, plan.copied, out=plan.keys)
        torch.index_select(_matrix(value), 0, plan.copied, out=plan.values)
        keys, values = plan.copies
        result, weight = _weighted(plan.alone, keys, values, self._fill, scaling)
        result = result.as_strided(*plan.results[1])
        if any(self._older):
            before, share = self._look_back(plan, key, value, scaling)
            before = before.as_strided(*plan.results[0])
            own = share.as_strided(*plan.weights[0]).sub_(weight.as_strided(*plan.weights[1]))
            _sigmoid(share)
            result = before.sub_(result).mul_(own.to(before.dtype)).add_(result)
        return result.reshape(1, query.shape[2], query.shape[1], -1)

    def _look_back(
        self, plan: _Plan, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the blocks ``[blocks, kv, rows, hd]`` to older parts, each row to that of its node,
        and the logarithms of the sums of weights, -inf for nodes that see no older part."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, older in enumerate(self._older):
            if older:
                keys, values = _cut(key, older, plan.blocks), _cut(value, older, plan.blocks)
                result, weight = _weighted(plan.in_blocks, keys, values, None, scaling)
                if found:
                    owned = plan.owned[number]
                    torch.where(owned, result, found[0][0], out=found[0][0])
                    torch.where(owned[..., 0], weight, found[0][1], out=found[0][1])
                else:
                    found.append((result, weight))
        ((results, weights),) = found
        if () in self._older:
            weights.masked_fill_(plan.owned[self._older.index(())][..., 0], float("-inf"))
        return results, weights

    def _plan(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Plan | None:
        """None if they do not consist of rows of one length, or keys and values lie differently."""
        kind = (query.shape, query.stride(), key.shape, key.stride())
        if (plan := self._plans.get(kind)) is None:
            size = query.shape[3]
            strides = [*query.stride()[1:3], *key.stride()[1:3]]
            if query.stride(3) != 1 or key.stride(3) != 1 or any(stride % size for stride in strides):
                return None
            plan = self._plans[kind] = _Plan(
                self._newer, self._which, len(self._older), self._height, self._rooms, query, key
            )
        return plan if value.stride() == key.stride() else None


def _regular(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies whose strides are those of their shapes, which ``contiguous()`` does not promise."""
    kind = torch.contiguous_format
    return query.clone(memory_format=kind), key.clone(memory_format=kind), value.clone(memory_format=kind)


def _cut(whole: torch.Tensor, older: tuple[int, ...], blocks: int) -> torch.Tensor:
    """The older part of ``[1, kv, total, hd]``, for each of so many blocks."""
    part = whole[:, :, older[0] : older[1]] if len(older) == 2 else whole[:, :, list(older)]
    return part if blocks == 1 else part.expand(blocks, -1, -1, -1)


def _index(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows.ravel())


def _sigmoid(whole: torch.Tensor) -> None:
    """In place, of ``[b, kv, rows]`` that lies by row and then by head.

    The exponential of a vector's worth of numbers and that of one differ in the last bit, so it is always of
    vectors.
    """
    missing = -whole.numel() % VECTOR
    if not missing:
        whole.sigmoid_()
        return
    by_row = whole.transpose(1, 2)
    filled = nn.functional.pad(by_row.reshape(-1), (0, missing)).sigmoid_()
    by_row.copy_(filled[:-missing].view(by_row.shape))


def _matrix(whole: torch.Tensor) -> torch.Tensor:
    """``[1, H, n, hd]`` as a matrix of all rows that there are between its first and its last."""
    _, heads, nodes, size = whole.shape
    _, apart, next_one, _ = whole.stride()
    return whole.as_strided((((heads - 1) * apart + (nodes - 1) * next_one) // size + 1, size), (size, 1))


def _weighted(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`weighted`, never of a single piece of work: its products alone would use several threads."""
    count, shared = query.shape[:2]
    if count * shared == 1:
        query, key, value = (whole.expand(2, -1, -1, -1) for whole in (query, key, value))
        mask = None if mask is None else mask.expand(2, -1, -1, -1)
    result, weights = weighted(query, key, value, mask, scaling)
    if shared > 1 and (result.stride(1) != result.shape[3] or weights.stride(1) != 1):
        # By row and then by head is how this kernel leaves them, and how they are read here.
        result, weights = (whole.transpose(1, 2).contiguous().transpose(1, 2) for whole in (result, weights))
    return (result, weights) if count * shared > 1 else (result[:1], weights[:1])
