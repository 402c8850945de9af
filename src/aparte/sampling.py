"""From logits to a token: pure functions over tensors, in float32.

Seeded Gumbel-max: the token at position ``t`` is ``argmax(processed_logits + g(seed, t))`` with noise
that depends only on seed, position and token id. So it does not matter in how many steps, in which
tree or after how many reconnects a position's logits arrive: the choice is the same, and over seeds
its distribution is exactly ``softmax(processed_logits)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from aparte.config import Penalties, Sampling
from aparte.likely import first_largest

NEVER = float("-inf")


def process(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p, ``[n, V] -> [n, V]``; what is cut becomes -inf."""
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        scaled = keep_top_k(scaled, sampling.top_k)
    if sampling.top_p < 1:
        scaled = keep_top_p(scaled, sampling.top_p)
    if sampling.min_p > 0:
        scaled = keep_min_p(scaled, sampling.min_p)
    return scaled


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep exactly the ``k`` largest of each row; of equal ones the lower token id, so that the choice
    does not depend on the sort."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return torch.full_like(logits, NEVER).scatter(-1, order[..., :k], logits.gather(-1, order[..., :k]))


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose probability reaches ``p``; at least one."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return torch.full_like(logits, NEVER).scatter(-1, order, ordered.masked_fill(before >= p, NEVER))


def keep_min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the tokens at least ``p`` times as probable as the most probable one."""
    probabilities = logits.softmax(dim=-1)
    floor = p * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < floor, NEVER)


def penalize(logits: torch.Tensor, written: Sequence[int], penalties: Penalties) -> torch.Tensor:
    """Logits ``[V]`` after the answer so far, ``written``: a function of that text and nothing else.

    So at a node of a draft tree it is given the path to that node, and the choice there is the one that
    decoding token by token would make.
    """
    result = logits.float().clone()
    for token, bias in penalties.bias:
        result[token] += bias
    if written and (penalties.frequency or penalties.presence):
        often = Counter(written)
        counts = torch.tensor(list(often.values()), dtype=torch.float32, device=result.device)
        result[list(often)] -= penalties.frequency * counts + penalties.presence
    return result


def gumbel_noise(seed: int, position: int, vocab: int) -> torch.Tensor:
    """``g(seed, position)``, float32 ``[V]``.

    Philox is a counter-based generator: the same on every platform, and two positions share no state.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64)))
    uniform = generator.random(vocab)  # float64, so that the tail of the noise is not cut short
    # random() may return 0; the smallest positive double keeps the logarithm finite.
    noise = -np.log(-np.log(np.maximum(uniform, np.finfo(np.float64).tiny)))
    return torch.from_numpy(noise.astype(np.float32))


def choose(logits: torch.Tensor, positions: Sequence[int], sampling: Sampling) -> list[int]:
    """The target's token after each node: row ``i`` of ``[n, V]`` decides position ``positions[i]``."""
    if sampling.greedy:
        return [int(token) for token in first_largest(logits).tolist()]
    processed = process(logits, sampling)
    noise = {position: gumbel_noise(sampling.seed, position, logits.shape[-1]) for position in set(positions)}
    noisy = processed + torch.stack([noise[position] for position in positions]).to(processed.device)
    return [int(token) for token in first_largest(noisy).tolist()]
