"""Drafters for tests: one that knows the answer, some that know nothing, some that are broken."""

from __future__ import annotations

import random
from collections.abc import Sequence

from aparte.speculate.drafter import Drafter, Outcome
from aparte.speculate.tree import DraftTree


class Oracle:
    """Proposes the true continuation."""

    runs_ahead = True

    def __init__(self, text: Sequence[int], block: int = 6) -> None:
        self._text = list(text)  # prompt and answer
        self._block = block

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        tokens = tuple(self._text[len(context) : len(context) + min(self._block, budget)])
        return DraftTree(tokens, tuple(range(-1, len(tokens) - 1)), (0.9,) * len(tokens))

    def observe(self, outcome: Outcome) -> None:
        pass


class Adversary(Oracle):
    """Proposes everything but the true continuation."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        return DraftTree(tuple((token + 1) % 250 for token in tree.tokens), tree.parents, tree.probabilities)


class RandomTrees:
    """Random tokens in random trees, now and then with the truth among them."""

    runs_ahead = True

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        self._text = list(text)
        self._random = random.Random(seed)

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        size = self._random.randint(0, budget)
        parents = tuple(self._random.randint(-1, node - 1) for node in range(size))
        truth = self._text[len(context) :]
        tokens = tuple(self._random.choice([*truth[:4], self._random.randrange(250)]) for _ in range(size))
        return DraftTree(tokens, parents, tuple(self._random.random() for _ in range(size)))

    def observe(self, outcome: Outcome) -> None:
        # A target that chooses tokens itself has no logits to show.
        assert len(outcome.choices) == 1 + len(outcome.tree)
        assert len(outcome.logits) in (0, 1 + len(outcome.tree))


class Broken:
    """Returns what no drafter should: bad ids, bad parents, twins, more than asked for, no numbers."""

    runs_ahead = True

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        count = budget + 50
        tokens = (-1, 10**9, 3, 3, 4, *([5] * (count - 5)))
        parents = (-1, -1, -1, -1, 99999, *range(4, count - 1))
        return DraftTree(tokens, parents, (float("nan"), float("inf"), -1.0, 2.0, 0.5))

    def observe(self, outcome: Outcome) -> None:
        pass


def all_drafters(text: Sequence[int]) -> dict[str, Drafter]:
    """One of each; ``text`` is prompt and true continuation."""
    return {
        "oracle": Oracle(text),
        "adversary": Adversary(text),
        "random": RandomTrees(text),
        "broken": Broken(),
    }
