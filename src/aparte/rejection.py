"""Rejection sampling of drafted tokens (SPADE, paper B; Leviathan et al. 2023, algorithm 1).

Everywhere ``p`` is the target's distribution and ``q`` the draft's. A token ``x`` drawn from ``q`` is
accepted with probability ``min(1, p(x) / q(x))``; where it is rejected, the token comes from the normalised
``max(0, p - q)``. Together that is exactly ``p``. Siblings of a tree, drawn from ``q`` one after the other
without replacement, are tried in the order in which they were drawn: each rejection turns ``p`` into the
normalised ``max(0, p - q)`` and takes the token out of ``q`` (SpecInfer's and EAGLE's rule for trees).

Two conditions make this exact. What is drawn must be judged: whoever drops a node because of *which* token
it holds biases the text. And the randomness of a verdict must be that of no draw: all noise here depends on
seed and position only, in streams of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aparte.distribution import UNDECIDED, Distribution

__all__ = ["UNDECIDED", "Distribution", "Noise", "draw", "draw_in_tree", "judge"]

#: The parent of nodes that hang directly below the root.
_BELOW_ROOT = -1
#: Streams of noise; 0 is that of :func:`aparte.sampling.gumbel_noise`, which coupled acceptance shares.
_ACCEPT, _RESIDUAL, _DRAFT, _TREE = 1, 2, 3, 4


@dataclass(frozen=True)
class Noise:
    """The randomness of a verdict. ``position`` is the index, in the whole text, of the token after the root.

    Counter-based, so the same on every platform and however often a step is sent again.
    """

    seed: int
    position: int

    def uniform(self, depth: int, rank: int) -> float:
        """In ``[0, 1)``, for the ``rank``-th sibling at ``depth`` below the root (0 for its children)."""
        return float(_generator(self.seed, self.position + depth, _ACCEPT, rank).random())

    def gumbel(self, depth: int, vocab: int) -> torch.Tensor:
        """Gumbel noise ``[V]``, float32, for the token that the target chooses at ``depth``."""
        return _gumbel(_generator(self.seed, self.position + depth, _RESIDUAL), vocab)


def draw(q: Distribution, count: int, *, seed: int, position: int) -> tuple[int, ...]:
    """``count`` tokens for ``position`` from ``q``, one after the other without replacement.

    Fewer if ``q`` has fewer with a probability. (The largest of log-probabilities with Gumbel noise, in
    order, are such draws.) For the drafting side; the verdict's noise is independent of it.
    """
    return _drawn(q, count, _generator(seed, position, _DRAFT))


def draw_in_tree(q: Distribution, *, seed: int, position: int, place: int) -> tuple[int, ...]:
    """All tokens of ``q`` that have a probability, drawn one after the other without replacement.

    For the ``place``-th place of a tree below the text of ``position`` tokens. No two places share noise, and
    no two trees: whether a further sibling is drawn may depend on what was drawn elsewhere in the tree, and
    then the verdict does too. Leaving some tokens out leaves draws from ``q`` without those.
    """
    return _drawn(q, len(q), _generator(seed, position, _TREE, place))


def _drawn(q: Distribution, count: int, generator: np.random.Generator) -> tuple[int, ...]:
    probabilities = torch.tensor(q.probabilities, dtype=torch.float32)
    noisy = probabilities.log() + _gumbel(generator, len(q))
    count = min(count, int((probabilities > 0).sum()))
    return tuple(q.tokens[index] for index in noisy.topk(count).indices.tolist())


def judge(
    parents: Sequence[int],
    tokens: Sequence[int],
    drawn: Sequence[Distribution],
    p: torch.Tensor,
    noise: Noise,
) -> tuple[int, ...]:
    """The target's choices: ``[0]`` after the root, ``[1 + i]`` after node ``i``.

    They are :data:`UNDECIDED` off the accepted path.

    Node ``i`` holds ``tokens[i]`` and hangs below node ``parents[i]`` or, -1, the root. It was drawn from
    ``drawn[i]`` less the tokens of its earlier siblings; for siblings that is usually one and the same
    distribution. Without ``drawn`` every node was named, not drawn: its ``q`` is all on its token. ``p`` is
    ``[1 + n, V]``, float32, after temperature, top-k, top-p and min-p; row 0 is that after the root.

    Raises ``ValueError`` if a token can't have been drawn from what it is said to come from, or is not among
    the target's: an honest draft has none, and no rule is exact for them.
    """
    if len(p) != 1 + len(tokens) or len(parents) != len(tokens) or len(drawn) not in (0, len(tokens)):
        raise ValueError("A block needs a parent and a distribution per token, and one more row of p.")
    vocab = p.shape[1]
    siblings: dict[int, list[int]] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if not _BELOW_ROOT <= parent < node or not 0 <= token < vocab:
            raise ValueError("A block holds a token or a parent that there is not.")
        siblings.setdefault(parent, []).append(node)
    choices = [UNDECIDED] * len(p)
    node, depth = _BELOW_ROOT, 0
    while True:
        nodes = siblings.get(node, [])
        tried = [tokens[child] for child in nodes]
        sources = [drawn[child] for child in nodes] if drawn else [Distribution.only(x) for x in tried]
        token = _decide(p[1 + node], tried, sources, noise, depth)
        choices[1 + node] = token
        if token not in tried:
            return tuple(choices)
        node, depth = nodes[tried.index(token)], depth + 1


def _decide(
    p: torch.Tensor, tried: Sequence[int], sources: Sequence[Distribution], noise: Noise, depth: int
) -> int:
    """One token from ``p`` ``[V]``: the first sibling that is accepted, or one from what is left of ``p``."""
    for rank, (token, source) in enumerate(zip(tried, sources, strict=True)):
        q = _without(source, tried[:rank])
        share = q.get(token, 0.0)
        if share <= 0 or max(q) >= len(p):
            raise ValueError(
                "A block holds a token that its distribution does not give, or one there is not."
            )
        # u < p(x) / q(x), without a division
        if noise.uniform(depth, rank) * share < float(p[token]):
            return token
        p = _residual(p, q)
    # After a rejection the log of what is gone is -inf: it is never chosen.
    return int((p.log() + noise.gumbel(depth, len(p)).to(p.device)).argmax())


def _without(source: Distribution, tokens: Sequence[int]) -> dict[int, float]:
    """``source`` less ``tokens``, normalised; empty if nothing is left."""
    left = dict(zip(source.tokens, source.probabilities, strict=True))
    for token in tokens:
        left.pop(token, None)
    total = math.fsum(left.values())
    return {token: share / total for token, share in left.items()} if total > 0 else {}


def _residual(p: torch.Tensor, q: dict[int, float]) -> torch.Tensor:
    """The normalised ``max(0, p - q)``; ``p`` itself if rounding leaves nothing of it.

    Exactly, nothing is left only of equal distributions, which reject nothing.
    """
    left = p.clone()
    left[list(q)] -= torch.tensor(list(q.values()), dtype=p.dtype, device=p.device)
    left.clamp_min_(0)
    total = left.sum()
    return left / total if total > 0 else p


def _generator(seed: int, position: int, stream: int, rank: int = 0) -> np.random.Generator:
    """Philox: key and the upper half of the counter tell streams apart, so that they never overlap."""
    key = np.array([seed, position], dtype=np.uint64)
    counter = np.array([0, 0, rank, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _gumbel(generator: np.random.Generator, count: int) -> torch.Tensor:
    uniform = np.maximum(generator.random(count), np.finfo(np.float64).tiny)
    return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32))
