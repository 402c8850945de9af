"""What a decoder layer does between its linears, compiled: one pass over a row in place of many operations.

A step of few nodes on a CPU spends most of its time *between* the matrix products: in dozens of operations
per layer, each of which costs more to find its code than to compute. The functions here are compiled by
Numba for the processor at hand, without a C++ compiler, and are called ten times per layer. Every row is
computed by the same code whatever rows are beside it, so a node's numbers do not depend on the others.

A row that an 8-bit product reads is scaled by its largest magnitude, as in
:class:`~aparte.model.linear.Int8Linear`: ``levels`` is the largest integer, and 0 leaves a row as it is. What
the product has to be multiplied by afterwards comes back in ``factors`` ``[n]``.

All arrays are C-contiguous: another layout would be compiled anew, in the middle of a text.
"""

from __future__ import annotations

import logging
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# It tells every step of compiling to whoever listens for debugging.
logging.getLogger("numba").setLevel(logging.WARNING)

#: Sums may be taken in another order, the same at every call, and there are no infinities to look after.
FAST = {"contract", "reassoc", "nsz", "nnan", "ninf"}

_f32 = np.float32
#: Below any magnitude that matters; keeps a row of zeros from being divided by zero.
_TINY = _f32(1e-30)
_LOG2_E = _f32(1.4426950408889634)
#: Exponents that float32 holds, with room.
_LIMIT = _f32(126.0)


def compiled(function: Any) -> Any:
    """``function``, compiled at its first call, and kept on disk for the next process."""
    return _kept(numba.njit, nogil=True)(function)


def entry(function: Any) -> Any:
    """``function`` of an address, compiled now for callers that know no Python."""
    return _kept(numba.cfunc, types.void(types.CPointer(types.int64)))(function)


def _kept(compiler: Any, *arguments: Any, **options: Any) -> Any:
    options |= {"fastmath": FAST, "error_model": "numpy"}

    def compile_it(function: Any) -> Any:
        try:
            return compiler(*arguments, cache=True, **options)(function)
        except RuntimeError:  # no folder that can be written
            return compiler(*arguments, **options)(function)

    return compile_it


@intrinsic  # type: ignore[untyped-decorator]
def _to_bits(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """A ``float32`` as the ``int32`` of the same bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def from_bits(_typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """The ``float32`` of the same bits as an ``int32``."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@compiled
def power_of_two(exponent: Any) -> Any:
    """``2^exponent``, to a float32's last bits, for exponents that float32 holds."""
    bounded = min(max(exponent, -_LIMIT), _LIMIT)
    nearest = np.int32(bounded + _f32(128.5)) - np.int32(128)
    t = bounded - _f32(nearest)
    # The series of 2^t for t in [-0.5, 0.5].
    high = _f32(0.0013333558) + t * _f32(0.00015403530)
    low = _f32(0.24022651) + t * (_f32(0.055504109) + t * (_f32(0.0096181291) + t * high))
    whole = from_bits((nearest + np.int32(127)) << np.int32(23))
    return whole * (_f32(1.0) + t * (_f32(0.69314718) + t * low))


@compiled
def largest(row: Any) -> Any:
    """The largest magnitude in ``row``. As integers, because processors compare many of those at once."""
    bits = np.int32(0)
    for d in range(len(row)):
        bits = max(bits, _to_bits(row[d]) & np.int32(0x7FFFFFFF))
    return max(from_bits(bits), _TINY)


@compiled
def _ordered(bits: Any) -> Any:
    """Integers in the order of the floats of these bits, and back again."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@compiled
def greatest(row: Any) -> Any:
    """The greatest number in ``row``, as :func:`largest` finds the largest magnitude."""
    order = np.int32(-0x80000000)
    for d in range(len(row)):
        order = max(order, _ordered(_to_bits(row[d])))
    return from_bits(_ordered(order))


@compiled
def _scale(row: Any, levels: Any, out: Any) -> Any:
    """Integers of at most ``levels`` for ``row`` into ``out``; returns what turns them back."""
    if levels == 0:
        for d in range(len(row)):
            out[d] = row[d]
        return _f32(1.0)
    most = largest(row)
    factor = _f32(levels) / most
    for d in range(len(row)):
        out[d] = np.rint(row[d] * factor)
    return most / _f32(levels)


@compiled
def scaled(rows: Any, levels: Any, out: Any, factors: Any) -> None:
    """``rows`` ``[n, D]`` as a product reads them."""
    for i in range(len(rows)):
        factors[i] = _scale(rows[i], levels, out[i])


@compiled
def _norm(row: Any, weight: Any, floor: Any, levels: Any, out: Any, room: Any) -> Any:
    """``row * weight / hypot(|row|, floor)``, as a product reads it."""
    total = _f32(0.0)
    for d in range(len(row)):
        total += row[d] * row[d]
    inverse = _f32(1.0) / np.sqrt(total + floor * floor)
    for d in range(len(row)):
        room[d] = row[d] * weight[d] * inverse
    return _scale(room, levels, out)


@compiled
def normed(rows: Any, weight: Any, floor: Any, levels: Any, out: Any, factors: Any) -> None:
    """The norm of ``rows`` ``[n, D]`` (:class:`~aparte.model.fuse.FastNorm`), as a product reads it."""
    room = np.empty(rows.shape[1], np.float32)
    for i in range(len(rows)):
        factors[i] = _norm(rows[i], weight, floor, levels, out[i], room)


@compiled
def added(rows: Any, products: Any, factors: Any, sums: Any) -> None:
    """``sums = rows + products * factors``, all ``[n, D]``."""
    for i in range(len(rows)):
        row, product, total, factor = rows[i], products[i], sums[i], factors[i]
        for d in range(len(row)):
            total[d] = row[d] + product[d] * factor


@compiled
def heads(
    products: Any,
    factors: Any,
    bias: Any,
    cos: Any,
    sin: Any,
    queries: Any,
    keys: Any,
    values: Any,
) -> None:
    """Queries ``[n, H, hd]``, keys and values ``[kv, n, hd]`` of ``products`` ``[n, (H + 2 kv) hd]``.

    Queries and keys are rotated by ``cos`` and ``sin`` ``[n, hd]``: the dimension ``d`` of the first half and
    of the second together.
    """
    count, size = queries.shape[1], queries.shape[2]
    shared, half = keys.shape[0], size // 2
    turned = np.empty(size, np.float32)
    for i in range(len(products)):
        product, factor = products[i], factors[i]
        cosines, sines = cos[i], sin[i]
        for head in range(count + 2 * shared):
            part = product[head * size : (head + 1) * size]
            own = bias[head * size : (head + 1) * size]
            for d in range(size):
                turned[d] = part[d] * factor + own[d]
            if head >= count + shared:
                row = values[head - count - shared, i]
                for d in range(size):
                    row[d] = turned[d]
                continue
            row = queries[i, head] if head < count else keys[head - count, i]
            low, high, to_low, to_high = turned[:half], turned[half:], row[:half], row[half:]
            cos_low, cos_high, sin_low, sin_high = cosines[:half], cosines[half:], sines[:half], sines[half:]
            for d in range(half):
                to_low[d] = low[d] * cos_low[d] - high[d] * sin_low[d]
                to_high[d] = high[d] * cos_high[d] + low[d] * sin_high[d]


@compiled
def gated(products: Any, factors: Any, levels: Any, out: Any, out_factors: Any) -> None:
    """``silu(gate) * up`` of ``products`` ``[n, 2 D]``, gate and up side by side, as a product reads it."""
    width = products.shape[1] // 2
    room = np.empty(width, np.float32)
    for i in range(len(products)):
        gate, up, factor = products[i, :width], products[i, width:], factors[i]
        for d in range(width):
            value = gate[d] * factor
            room[d] = value * (up[d] * factor) / (_f32(1.0) + power_of_two(-value * _LOG2_E))
        out_factors[i] = _scale(room, levels, out[i])


@compiled
def store(keys: Any, values: Any, all_keys: Any, all_values: Any, first: Any) -> None:
    """Rows ``[kv, n, hd]`` to buffers ``[kv, capacity, hd]`` from row ``first`` on."""
    for head in range(keys.shape[0]):
        for i in range(keys.shape[1]):
            for new, buffer in ((keys, all_keys), (values, all_values)):
                row, place = new[head, i], buffer[head, first + i]
                for d in range(len(row)):
                    place[d] = row[d]


@compiled
def store_scaled(
    keys: Any, values: Any, all_keys: Any, all_values: Any, key_scales: Any, value_scales: Any, first: Any
) -> None:
    """:func:`store` in 8-bit integers, with a scale per row (:class:`~aparte.model.kv.ScaledRows`)."""
    for head in range(keys.shape[0]):
        for i in range(keys.shape[1]):
            for new, buffer, scales in ((keys, all_keys, key_scales), (values, all_values, value_scales)):
                row, place = new[head, i], buffer[head, first + i]
                scale = largest(row) / _f32(127.0)
                for d in range(len(row)):
                    place[d] = np.int8(np.rint(row[d] / scale))
                scales[head, first + i] = scale
