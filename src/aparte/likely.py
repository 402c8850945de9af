"""The most probable next tokens after a node: what drafting learns from, also where logits stay elsewhere."""

from __future__ import annotations

import torch

#: Values per block in :func:`largest`.
BLOCK = 128


def likely(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The ``count`` most probable tokens of each row ``[n, V]``. No vocabulary may be smaller than that."""
    logits = logits.float()
    best, ids = largest(logits, count)
    # The share within the full distribution, so that a flat one does not look certain.
    top = best[:, :1]
    shares = (best - top).exp_() / (logits - top).exp_().sum(dim=-1, keepdim=True)
    return [
        list(zip(tokens, values, strict=True))
        for tokens, values in zip(ids.tolist(), shares.tolist(), strict=True)
    ]


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """``argmax`` of each row ``[n, V] -> [n]``, of equal ones the first, in a fifth of its time on a CPU.

    As in :func:`largest`: maxima of blocks take vector instructions, and one block is left to look into.
    """
    rows, vocab = logits.shape
    whole = vocab // BLOCK * BLOCK
    if whole < 8 * BLOCK or logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    blocks = logits[:, :whole].unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    found = blocks.amax(dim=-1).argmax(dim=-1)
    row = torch.arange(rows)
    inside = blocks[row, found]  # [n, BLOCK]
    places: torch.Tensor = found * BLOCK + inside.argmax(dim=-1)
    if whole == vocab:
        return places
    rest = logits[:, whole:]
    later = whole + rest.argmax(dim=-1)
    return torch.where(logits[row, later] > logits[row, places], later, places)


def largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, in descending order, and their places, both ``[n, count]``.

    ``topk`` looks at one value after the other. Maxima of blocks take vector instructions, and the
    largest values lie in the blocks with the largest maxima, so that few blocks are left to look into.
    """
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if blocks < 8 * count:
        found = logits.topk(count, dim=-1)
        return found.values, found.indices
    maxima = logits[:, : blocks * BLOCK].view(rows, blocks, BLOCK).amax(dim=-1)
    starts = maxima.topk(count, dim=-1).indices * BLOCK
    places = (starts[:, :, None] + torch.arange(BLOCK, device=logits.device)).flatten(1)
    rest = torch.arange(blocks * BLOCK, vocab, device=logits.device).expand(rows, -1)
    places = torch.cat([places, rest], dim=-1)
    found = logits.gather(1, places).topk(count, dim=-1)
    return found.values, places.gather(1, found.indices)
