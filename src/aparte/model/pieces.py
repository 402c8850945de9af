"""Attention of few nodes over a long text, with the text in pieces.

The kernel divides its work among processors by heads and by rows of the query. A step of few nodes over a
model with few key heads is then hardly any pieces of work, each of them a long walk through the cache: three
for the default model, so that one of two processors waits a third of the time. Here the text is what is
divided. Every piece is attended to by itself, and what the kernel knows of a piece besides its result, the
logarithm of the sum of its weights, says how much of it goes into the whole (as in FlashDecoding). Heads
that share keys are rows of one query, so that the cache is read once.
"""

from __future__ import annotations

import torch

from aparte.model.inputs import HIDDEN

#: Rows of the cache per piece, about.
PIECE = 1024
#: Texts shorter than this stay whole.
SHORTEST = 2 * PIECE
#: Steps of more nodes have enough pieces of work without.
MOST_NODES = 8

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def worthwhile(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether :func:`attend` is for this step: shapes as there, ``mask`` None or added to the scores."""
    batch, _, nodes, _ = query.shape
    if batch != 1 or nodes > MOST_NODES or key.shape[2] < SHORTEST or key.device.type != "cpu":
        return False
    if key.shape[-1] != value.shape[-1]:
        return False  # nothing that the kernel does
    return nodes == 1 if mask is None else mask.is_floating_point()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """``query`` ``[1, H, n, hd]``, ``key`` and ``value`` ``[1, kv, total, hd]``, ``mask``
    ``[1, 1, n, total]``; returns ``[1, n, H, hd]``."""
    _, heads, nodes, size = query.shape
    shared, total = key.shape[1:3]
    rows = query.reshape(1, shared, -1, size)
    count = total // PIECE
    length = total // count
    # Pieces are of one length; what is left, a few rows, is one more at the beginning.
    rest = total - count * length
    results, weights = _attend(
        rows, key[:, :, rest:], value[:, :, rest:], _cut(mask, rest, total), length, scaling
    )
    if rest:
        first = _attend(rows, key[:, :, :rest], value[:, :, :rest], _cut(mask, 0, rest), rest, scaling)
        results, weights = torch.cat([first[0], results]), torch.cat([first[1], weights])
    shares = weights.softmax(0).unsqueeze(-1).to(results.dtype)
    return (results * shares).sum(0).view(1, heads, nodes, size).transpose(1, 2)


def _attend(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    length: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results ``[pieces, kv, rows, hd]`` and logarithms of the sums of weights ``[pieces, kv, rows]``."""
    keys, values = (_pieces(whole, length) for whole in (key, value))
    count = len(keys)
    hidden = None
    if mask is not None:
        nodes = len(mask)
        cut = mask.view(nodes, count, length).transpose(0, 1)
        # The kernel gives 0, of all numbers, as the logarithm where nothing is to be seen.
        hidden = cut.amax(-1) == HIDDEN
        repeats = rows.shape[2] // nodes
        mask = cut.repeat(1, repeats, 1).unsqueeze(1)
        hidden = hidden.repeat(1, repeats).unsqueeze(1)
    results, weights = weighted(rows.expand(count, -1, -1, -1), keys, values, mask, scaling)
    return results, weights if hidden is None else weights.masked_fill(hidden, HIDDEN)


def weighted(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``[b, kv, rows, hd]``, and the logarithms of the sums of weights ``[b, kv, rows]``."""
    result: tuple[torch.Tensor, torch.Tensor] = _KERNEL(
        query, key, value, 0.0, False, attn_mask=mask, scale=scaling
    )
    return result


def _pieces(whole: torch.Tensor, length: int) -> torch.Tensor:
    """``[1, kv, count * length, hd] -> [count, kv, length, hd]``, without a copy."""
    return torch.unflatten(whole[0], 1, (-1, length)).transpose(0, 1)


def _cut(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    """``[1, 1, n, total] -> [n, stop - start]``."""
    return None if mask is None else mask[0, 0, :, start:stop].contiguous()
