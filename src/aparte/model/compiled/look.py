"""What the heads of a node do with a block of positions: attention, compiled, with the sum kept open.

Processors turn and load a key once for three queries where they can. Which queries go together depends on
their heads alone, so that a head's arithmetic is the same at every node.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aparte.model.compiled.kernels import compiled, greatest, power_of_two

#: Positions that are looked at together.
BLOCK = 64

_f32 = np.float32
#: Below any score.
LOWEST = _f32(-1e30)
#: Weights below two to this are nothing. Products with them would be denormal numbers, which are slow.
_FAINT = _f32(-100.0)


@compiled
def _score(query: Any, keys: Any, count: Any, scores: Any) -> None:
    """Products of one query with ``count`` keys."""
    for j in range((count + 3) // 4):
        first, second, third, fourth = keys[4 * j], keys[4 * j + 1], keys[4 * j + 2], keys[4 * j + 3]
        a, b, c, e = _f32(0.0), _f32(0.0), _f32(0.0), _f32(0.0)
        for d in range(len(query)):
            q = query[d]
            a += q * _f32(first[d])
            b += q * _f32(second[d])
            c += q * _f32(third[d])
            e += q * _f32(fourth[d])
        scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3] = a, b, c, e


@compiled
def _score_three(queries: Any, keys: Any, count: Any, scores: Any) -> None:
    """:func:`_score` of three, which turns keys into floats once for all."""
    one, two, three = queries[0], queries[1], queries[2]
    of_one, of_two, of_three = scores[0], scores[1], scores[2]
    for j in range((count + 1) // 2):
        first, second = keys[2 * j], keys[2 * j + 1]
        a, b, c, e, f, g = _f32(0.0), _f32(0.0), _f32(0.0), _f32(0.0), _f32(0.0), _f32(0.0)
        for d in range(len(one)):
            key = _f32(first[d])
            a += one[d] * key
            b += two[d] * key
            c += three[d] * key
            key = _f32(second[d])
            e += one[d] * key
            f += two[d] * key
            g += three[d] * key
        of_one[2 * j], of_two[2 * j], of_three[2 * j] = a, b, c
        of_one[2 * j + 1], of_two[2 * j + 1], of_three[2 * j + 1] = e, f, g


@compiled
def _weigh(count: Any, key_scales: Any, value_scales: Any, scores: Any, total: Any, weight: Any) -> None:
    """Turn the scores of ``count`` positions into weights: ``2^(score - highest)``. ``weight`` is the highest
    so far and the sum, ``total`` what was found, which is less beside a higher one."""
    if len(key_scales):
        for j in range(BLOCK):
            scores[j] *= key_scales[j]
    for j in range(count, BLOCK):
        scores[j] = LOWEST
    highest = max(weight[0], greatest(scores))
    if highest > weight[0]:
        less = power_of_two(weight[0] - highest)
        weight[0] = highest
        weight[1] *= less
        for d in range(len(total)):
            total[d] *= less
    together = _f32(0.0)
    for j in range(BLOCK):
        power = scores[j] - highest
        scores[j] = power_of_two(power) if power > _FAINT else _f32(0.0)
        together += scores[j]
    weight[1] += together
    if len(value_scales):
        for j in range(BLOCK):
            scores[j] *= value_scales[j]
    for j in range(count, BLOCK):
        scores[j] = _f32(0.0)


@compiled
def _gather(scores: Any, values: Any, count: Any, total: Any) -> None:
    """Add ``count`` values by their weights to what one head found."""
    for j in range((count + 7) // 8):
        v0, v1, v2, v3 = values[8 * j], values[8 * j + 1], values[8 * j + 2], values[8 * j + 3]
        v4, v5, v6, v7 = values[8 * j + 4], values[8 * j + 5], values[8 * j + 6], values[8 * j + 7]
        w = scores[8 * j : 8 * j + 8]
        w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
        for d in range(len(total)):
            total[d] += (
                w0 * _f32(v0[d]) + w1 * _f32(v1[d]) + w2 * _f32(v2[d]) + w3 * _f32(v3[d])
                + w4 * _f32(v4[d]) + w5 * _f32(v5[d]) + w6 * _f32(v6[d]) + w7 * _f32(v7[d])
            )  # fmt: skip


@compiled
def _gather_three(scores: Any, values: Any, count: Any, totals: Any) -> None:
    """:func:`_gather` of three."""
    one, two, three = totals[0], totals[1], totals[2]
    for j in range((count + 3) // 4):
        v0, v1, v2, v3 = values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]
        a, b, c = scores[0, 4 * j : 4 * j + 4], scores[1, 4 * j : 4 * j + 4], scores[2, 4 * j : 4 * j + 4]
        a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
        b0, b1, b2, b3 = b[0], b[1], b[2], b[3]
        c0, c1, c2, c3 = c[0], c[1], c[2], c[3]
        for d in range(len(one)):
            x0, x1, x2, x3 = _f32(v0[d]), _f32(v1[d]), _f32(v2[d]), _f32(v3[d])
            one[d] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            two[d] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            three[d] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3


@compiled
def look(
    queries: Any, keys: Any, key_scales: Any, values: Any, value_scales: Any, count: Any,
    scores: Any, totals: Any, weights: Any,
) -> None:  # fmt: skip
    """Add ``count`` positions to what a node's heads have seen, by threes, then one by one.

    ``queries`` ``[group, hd]`` are those of the heads that share ``keys`` and ``values`` ``[BLOCK, hd]``,
    whose scales ``[BLOCK]`` are empty if they have none. What was found so far is ``totals`` ``[group, hd]``,
    by ``weights`` ``[group, 2]``: the highest score, and the sum of ``2^(score - highest)``. Rows beyond
    ``count`` may hold any finite numbers; ``scores`` ``[group, BLOCK]`` is room.
    """
    group = len(queries)
    threes = group // 3 * 3
    for g in range(0, threes, 3):
        _score_three(queries[g : g + 3], keys, count, scores[g : g + 3])
    for g in range(threes, group):
        _score(queries[g], keys, count, scores[g])
    for g in range(group):
        _weigh(count, key_scales, value_scales, scores[g], totals[g], weights[g])
    for g in range(0, threes, 3):
        _gather_three(scores[g : g + 3], values, count, totals[g : g + 3])
    for g in range(threes, group):
        _gather(scores[g], values, count, totals[g])
