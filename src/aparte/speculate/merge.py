"""One tree from many sources, grown best first.

The next node added is always the one most likely to lie on the accepted path: the product of the
estimates along its path. So every prefix of the tree's nodes is the best tree of its size, and the node
budget can cut anywhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aparte.speculate.calibration import Calibration
from aparte.speculate.drafter import Outcome, wanted_likely
from aparte.speculate.outstanding import Outstanding
from aparte.speculate.source import Candidate, Source
from aparte.speculate.tree import BELOW_ROOT, DraftTree

#: Nodes less likely than this are never worth a place.
MIN_PROBABILITY = 0.001
#: Classes of merged chances.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
#: The name of their kinds.
MERGED = "merged"


@dataclass
class _Proposal:
    """What each source said at each node of a proposal, for calibration when its outcome is there."""

    context: tuple[int, ...]
    said: dict[int, list[list[Candidate]]] = field(default_factory=dict)
    #: What came of that for each token, as a candidate of its own.
    merged: dict[int, list[Candidate]] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    #: For each node, the product of the largest single estimates along its path.
    alone: list[float] = field(default_factory=list)


class Merged:
    """A drafter made of sources, with one calibration for all of them."""

    runs_ahead = True

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self.likely = wanted_likely(self._sources)
        self.calibration = Calibration()
        self._proposals: Outstanding[_Proposal] = Outstanding()

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        proposal = _Proposal(tuple(context))
        self._proposals.begin(context)
        self._proposals.add(context, proposal)
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        waiting: list[tuple[float, int, int, int, list[Any]]] = []  # (-p, age, parent, token, places)
        age = 0

        def expand(node: int, places: list[Any], probability: float) -> None:
            nonlocal age
            merged = proposal.merged[node] = self._ask(proposal, node, places)
            for token, chance in self._settled(merged):
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
            before = 1.0 if parent == BELOW_ROOT else proposal.alone[parent]
            proposal.alone.append(before * self._largest(proposal.said[parent], token))
            moved = [
                source.advance(place, token) for source, place in zip(self._sources, places, strict=True)
            ]
            expand(len(tokens) - 1, moved, -negative)
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))
        proposal.children = tree.children()
        return tree

    def observe(self, outcome: Outcome) -> None:
        """Calibrate along the accepted path, where every source was asked, then let the sources learn."""
        proposal = self._proposals.settle(outcome)
        gains = self._gains(proposal, outcome)
        # The loop may have cut the tree, so the path is followed by its tokens, not by node numbers.
        node = BELOW_ROOT
        for depth, choice in enumerate(outcome.accepted.tokens):
            for candidates in (*proposal.said.get(node, ()), proposal.merged.get(node, ())):
                for candidate in candidates:
                    if depth >= outcome.known:  # what came out before was counted then
                        self.calibration.record(candidate, candidate.token == choice)
            node = proposal.children.get((node, choice), len(proposal.said))
        for source, gained in zip(self._sources, gains, strict=True):
            source.learn(proposal.context, replace(outcome, gained=gained))

    def _gains(self, proposal: _Proposal, outcome: Outcome) -> list[int]:
        """For each source, how many tokens of the accepted path the others would not have brought.

        They would have brought a node if their estimates had given it a place in the tree that was sent. As
        agreement counts for more than a single estimate, it is single ones that are compared.
        """
        floor = min(proposal.alone[: len(outcome.tree)], default=1.0)
        length = len(outcome.accepted.path)
        chances = [1.0] * len(self._sources)
        gains = [0] * len(self._sources)
        node = BELOW_ROOT
        for depth, token in enumerate(outcome.accepted.tokens[:length]):
            said = proposal.said.get(node)
            if said is None:
                break
            best = [self._chance(candidates, token) for candidates in said]
            for index in range(len(best)):
                chances[index] *= max((*best[:index], *best[index + 1 :]), default=0.0)
                if chances[index] < floor and not gains[index]:
                    gains[index] = length - max(depth, outcome.known)
            node = proposal.children.get((node, token), len(proposal.said))
        return gains

    def _largest(self, said: list[list[Candidate]], token: int) -> float:
        return max(self._chance(candidates, token) for candidates in said)

    def _chance(self, candidates: list[Candidate], token: int) -> float:
        """What one source's candidates give ``token``."""
        return max(
            (self.calibration.probability(one) for one in candidates if one.token == token), default=0.0
        )

    def _ask(self, proposal: _Proposal, node: int, places: list[Any]) -> list[Candidate]:
        """Every source's candidates below ``node``, each with its chance beside all others.

        Estimates are made one by one. Sources that agree count as if they were wrong independently of each
        other; and as there is one next token, a less likely one gets of its chance what the likelier ones
        leave. Scaling all of them down instead would take most from those that are sure. As sources err
        together more often than that supposes, what comes out is calibrated once more (:meth:`_settled`).
        """
        said = [source.candidates(place) for source, place in zip(self._sources, places, strict=True)]
        proposal.said[node] = said
        wrong: dict[int, float] = {}
        agreeing: dict[int, int] = {}
        for candidates in said:
            best: dict[int, float] = {}
            for candidate in candidates:
                chance = self.calibration.probability(candidate)
                best[candidate.token] = max(chance, best.get(candidate.token, 0.0))
            for token, chance in best.items():
                wrong[token] = wrong.get(token, 1.0) * (1 - chance)
                agreeing[token] = agreeing.get(token, 0) + 1
        merged, left, deep = [], 1.0, int(node != BELOW_ROOT)
        for token, missed in sorted(wrong.items(), key=lambda item: item[1]):
            chance = left * (1 - missed)
            kind = (MERGED, bisect_right(_EDGES, chance), min(3, agreeing[token]), deep)
            merged.append(Candidate(token, kind, chance))
            left *= missed
        return merged

    def _settled(self, merged: list[Candidate]) -> list[tuple[int, float]]:
        """Tokens with what is made of their merged chances: how often those of that size, on which so many
        sources agreed, were right. Together they are 1 at most."""
        chances = sorted(
            ((self.calibration.probability(candidate), candidate.token) for candidate in merged),
            key=lambda pair: -pair[0],
        )
        settled, left = [], 1.0
        for chance, token in chances:
            settled.append((token, min(chance, left)))
            left = max(0.0, left - chance)
        return settled
