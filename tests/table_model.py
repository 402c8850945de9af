"""A model that is a table, for tests of drafters: exact distributions, and a target that judges by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from aparte.config import Sampling
from aparte.rejection import Noise, judge
from aparte.sampling import choose, process
from aparte.speculate.neural import Guess
from aparte.speculate.tree import DraftTree

VOCAB = 6
NO_LOGITS = torch.empty(0, VOCAB)


def logits_after(text: Sequence[int], whose: int = 0) -> torch.Tensor:
    """Logits from the last two tokens."""
    return _logits(whose, *text[-2:])


@cache
def _logits(whose: int, *last: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((whose, *last)) % 2**31)
    return 1.5 * torch.randn(VOCAB, generator=generator)


class Table:
    """A :class:`~aparte.speculate.neural.TreeModel` over such logits, mixed with another model's."""

    def __init__(self, closeness: float = 1.0, top: int = VOCAB) -> None:
        self._closeness = closeness
        self._top = top
        self.passes = 0

    def begin(self, context: Sequence[int]) -> Guess | None:
        self._context, self._paths = tuple(context), list[tuple[int, ...]]()
        return self._guess(())

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        new = [
            (*(self._paths[parent] if parent >= 0 else ()), token)
            for parent, token in zip(parents, tokens, strict=True)
        ]
        self._paths += new
        return [self._guess(path) for path in new]

    def _guess(self, path: tuple[int, ...]) -> Guess:
        self.passes += 1
        text = (*self._context, *path)
        near = self._closeness * logits_after(text) + (1 - self._closeness) * logits_after(text, 1)
        best = near.softmax(-1).topk(self._top)
        return Guess(tuple(best.indices.tolist()), tuple(best.values.tolist()))


def target(tree: DraftTree, context: Sequence[int], sampling: Sampling, rejection: bool) -> tuple[int, ...]:
    """The verifier's choices."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    logits = torch.stack([logits_after((*context, *path)) for path in ((), *paths)])
    if rejection:
        p = process(logits, sampling).softmax(-1)
        return judge(tree.parents, tree.tokens, tree.drawn, p, Noise(sampling.seed, len(context)))
    positions = [len(context) + depth for depth in (0, *tree.depths())]
    return tuple(choose(logits, positions, sampling))
