"""Attention of a few nodes, each over its own path, compiled (:mod:`aparte.model.compiled.kernels`).

A node of a token tree sees the committed prefix, which lies side by side in the cache, and some of the rows
behind it. The library's kernels are given a mask for that, read keys in the numbers they compute in, and
divide their work by heads, of which small models have three. Here a path is walked in pieces of positions by
all processors, and 8-bit rows are read as they lie.

A node's numbers depend on its path alone: position by position, it is the same arithmetic in the same order
wherever in the cache a position lies, and whatever nodes there are beside it.
"""

from __future__ import annotations

from array import array
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from aparte.model.compiled.kernels import compiled, entry, from_bits, power_of_two
from aparte.model.compiled.look import BLOCK, LOWEST, look
from aparte.model.compiled.team import call, pointer, team
from aparte.model.kv import Raw
from aparte.model.paths import Paths

Array = npt.NDArray[Any]

#: Positions that one processor walks through at a time.
PIECE = 256
#: Positions times heads times nodes from which on other threads are given some.
WORTH_SHARING = 1024

_f32 = np.float32
_LOG2_E = 1.4426950408889634


class Walk:
    """The attention of one step's ``paths`` in every layer of a shape."""

    def __init__(self, paths: Paths, heads: int, shared: int, size: int, scaling: float) -> None:
        self.shape = (heads, shared, size, scaling)
        self._paths = paths
        nodes = len(paths.counts)
        pieces = -(-(paths.prefix + paths.longest) // PIECE)
        self._sums = np.empty((nodes, pieces, heads, size), np.float32)
        self._weights = np.empty((nodes, pieces, heads, 2), np.float32)
        self._threads = 1 if nodes * heads * paths.prefix < WORTH_SHARING else torch.get_num_threads()
        of_step = (paths.rows, paths.counts, self._sums, self._weights)
        #: What compiled functions are given: the last six are those of a layer.
        self._given = array(
            "q",
            (
                nodes, heads, shared, size, paths.prefix, paths.longest, pieces, self._threads,
                team().number, team().size, int(np.float32(scaling * _LOG2_E).view(np.int32)),
                *(each.ctypes.data for each in of_step), 0, 0, 0, 0, 0, 0,
            ),
        )  # fmt: skip
        self._address = self._given.buffer_info()[0]
        self._run = team().run

    def attend(self, queries: int, keys: Raw, values: Raw, result: Array) -> None:
        """Queries ``[n, H, hd]`` at that address over ``keys`` and ``values``, to ``result`` of their shape,
        all contiguous."""
        rows = keys.rows.shape[1]
        addresses = keys.address, values.address, keys.scale_address, values.scale_address
        self._given[-6:] = array("q", (queries, rows, *addresses))
        walker = _INTEGERS if keys.scaled else _FLOATS
        self._run(walker, self._address, self._threads)
        _merge(self._sums, self._weights, self._paths.prefix, self._paths.counts, result)


def walk_of(paths: Paths, *shape: Any) -> Walk:
    """That of ``paths``, which layers of the same ``shape`` share: what :class:`Walk` is made of."""
    walk: Walk | None = paths.walk
    if walk is None or walk.shape != shape:
        paths.walk = walk = Walk(paths, *shape)
    return walk


@compiled
def _walk(
    queries: Any, factor: Any, keys: Any, key_scales: Any, values: Any, value_scales: Any,
    prefix: Any, rows: Any, counts: Any, sums: Any, weights: Any, first_unit: Any, end_unit: Any,
) -> None:  # fmt: skip
    """Every unit is a piece of a node's path in one key head."""
    shared, pieces, size, scaled = keys.shape[0], sums.shape[1], keys.shape[2], len(key_scales) > 0
    group = queries.shape[1] // shared
    asked = np.empty((group, size), np.float32)
    scores = np.empty((group, BLOCK), np.float32)
    # The end of a path, copied side by side. What is left over there counts for nothing, and is finite.
    near_keys, near_values = np.zeros((BLOCK, size), keys.dtype), np.zeros((BLOCK, size), keys.dtype)
    near_key_scales = np.zeros(BLOCK if scaled else 0, np.float32)
    near_value_scales = np.zeros_like(near_key_scales)
    for unit in range(first_unit, end_unit):
        head, piece, node = unit % shared, unit // shared % pieces, unit // shared // pieces
        start, stop = piece * PIECE, min(piece * PIECE + PIECE, prefix + counts[node])
        for g in range(group):
            out, weight = sums[node, piece, head * group + g], weights[node, piece, head * group + g]
            weight[0], weight[1] = LOWEST, _f32(0.0)
            query, own = asked[g], queries[node, head * group + g]
            for d in range(size):
                query[d] = own[d] * factor
                out[d] = _f32(0.0)
        for base in range(start, stop, BLOCK):
            count = min(BLOCK, stop - base)
            if base + BLOCK > prefix:
                for j in range(count):
                    row = base + j if base + j < prefix else rows[node, base + j - prefix]
                    key, value = keys[head, row], values[head, row]
                    near_key, near_value = near_keys[j], near_values[j]
                    for d in range(size):
                        near_key[d] = key[d]
                        near_value[d] = value[d]
                    if scaled:
                        near_key_scales[j] = key_scales[head, row]
                        near_value_scales[j] = value_scales[head, row]
                block_keys, block_values = near_keys, near_values
                block_key_scales, block_value_scales = near_key_scales, near_value_scales
            else:
                block_keys = keys[head, base : base + BLOCK]
                block_values = values[head, base : base + BLOCK]
                if scaled:
                    block_key_scales = key_scales[head, base : base + BLOCK]
                    block_value_scales = value_scales[head, base : base + BLOCK]
                else:
                    block_key_scales, block_value_scales = near_key_scales, near_value_scales
            heads = slice(head * group, head * group + group)
            look(
                asked, block_keys, block_key_scales, block_values, block_value_scales, count,
                scores, sums[node, piece, heads], weights[node, piece, heads],
            )  # fmt: skip


@compiled
def _share(given: Any, kind: Any) -> None:
    """What the thread that calls this does of a walk through rows of numbers of that ``kind``."""
    nodes, heads, shared, size = given[0], given[1], given[2], given[3]
    prefix, longest, pieces = given[4], given[5], given[6]
    number, threads = 0, given[7]
    if threads > 1 and given[8]:  # it may get fewer than it asks for
        number, threads = call(given[8]), call(given[9])
    else:
        threads = 1
    units = nodes * pieces * shared
    capacity = given[16]
    rows, scales = (shared, capacity, size), (shared, capacity) if given[19] else (0, 0)
    _walk(
        numba.carray(pointer(given[15]), (nodes, heads, size), np.float32),
        from_bits(np.int32(given[10])),
        numba.carray(pointer(given[17]), rows, kind),
        numba.carray(pointer(given[19]), scales, np.float32),
        numba.carray(pointer(given[18]), rows, kind),
        numba.carray(pointer(given[20]), scales, np.float32),
        prefix,
        numba.carray(pointer(given[11]), (nodes, longest), np.int64),
        numba.carray(pointer(given[12]), nodes, np.int64),
        numba.carray(pointer(given[13]), (nodes, pieces, heads, size), np.float32),
        numba.carray(pointer(given[14]), (nodes, pieces, heads, 2), np.float32),
        units * number // threads,
        units * (number + 1) // threads,
    )


@entry
def _through_floats(address: Any) -> None:
    _share(numba.carray(address, 21), np.float32)


@entry
def _through_integers(address: Any) -> None:
    _share(numba.carray(address, 21), np.int8)


@compiled
def _merge(sums: Any, weights: Any, prefix: Any, counts: Any, result: Any) -> None:
    """What each piece of a node's path found, put together in the order of the path."""
    for node in range(sums.shape[0]):
        pieces = (prefix + counts[node] + PIECE - 1) // PIECE
        for head in range(sums.shape[2]):
            highest, total = weights[node, 0, head, 0], weights[node, 0, head, 1]
            out, first = result[node, head], sums[node, 0, head]
            for d in range(len(out)):
                out[d] = first[d]
            for piece in range(1, pieces):
                other = sums[node, piece, head]
                top = max(highest, weights[node, piece, head, 0])
                before = power_of_two(highest - top)
                more = power_of_two(weights[node, piece, head, 0] - top)
                highest, total = top, total * before + weights[node, piece, head, 1] * more
                for d in range(len(out)):
                    out[d] = out[d] * before + other[d] * more
            for d in range(len(out)):
                out[d] /= total


_FLOATS, _INTEGERS = int(_through_floats.address), int(_through_integers.address)
