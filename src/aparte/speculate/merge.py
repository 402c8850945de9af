"""One tree from many sources, grown best first.

The next node added is always the one most likely to lie on the accepted path: the product of the
estimates along its path. So every prefix of the tree's nodes is the best tree of its size, and the node
budget can cut anywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from aparte.speculate.calibration import Calibration
from aparte.speculate.drafter import Outcome
from aparte.speculate.source import Candidate, Source
from aparte.speculate.tree import BELOW_ROOT, DraftTree

#: Nodes less likely than this are never worth a place.
MIN_PROBABILITY = 0.001


class Merged:
    """A drafter made of sources, with one calibration for all of them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self.calibration = Calibration()
        self._context: Sequence[int] = ()
        # What each source said at each node of the last proposal, for calibration.
        self._said: dict[int, list[list[Candidate]]] = {}
        self._children: dict[tuple[int, int], int] = {}

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        self._context = list(context)
        self._said = {}
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        waiting: list[tuple[float, int, int, int, list[Any]]] = []  # (-p, age, parent, token, places)
        age = 0

        def expand(node: int, places: list[Any], probability: float) -> None:
            nonlocal age
            for token, chance in self._ask(node, places).items():
                path_probability = probability * chance
                if path_probability >= MIN_PROBABILITY:
                    age += 1
                    heapq.heappush(waiting, (-path_probability, age, node, token, places))

        expand(BELOW_ROOT, [source.start(context) for source in self._sources], 1.0)
        while waiting and len(tokens) < budget:
            negative, _, parent, token, places = heapq.heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(-negative)
            moved = [
                source.advance(place, token) for source, place in zip(self._sources, places, strict=True)
            ]
            expand(len(tokens) - 1, moved, -negative)
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))
        self._children = tree.children()
        return tree

    def observe(self, outcome: Outcome) -> None:
        """Calibrate along the accepted path, where every source was asked, then let the sources learn."""
        # The loop may have cut the tree, so the path is followed by its tokens, not by node numbers.
        node = BELOW_ROOT
        for choice in outcome.accepted.tokens:
            for candidates in self._said.get(node, ()):
                for candidate in candidates:
                    self.calibration.record(candidate, candidate.token == choice)
            node = self._children.get((node, choice), len(self._said))
        for source in self._sources:
            source.learn(self._context, outcome)

    def _ask(self, node: int, places: list[Any]) -> dict[int, float]:
        """Every source's candidates below ``node``; of two estimates for one token the larger counts."""
        said = [source.candidates(place) for source, place in zip(self._sources, places, strict=True)]
        self._said[node] = said
        chances: dict[int, float] = {}
        for candidates in said:
            for candidate in candidates:
                chance = self.calibration.probability(candidate)
                chances[candidate.token] = max(chance, chances.get(candidate.token, 0.0))
        # Estimates are made one by one; together they must not promise more than one next token.
        total = sum(chances.values())
        return {token: chance / max(1.0, total) for token, chance in chances.items()}
