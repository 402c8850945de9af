"""Drawing trees for a verifier that samples by rejection: siblings without replacement, where they pay.

At every place of the tree candidates are tried in turn: a token that a source *names*, or one that is *drawn*
from what a model thinks comes next. The verifier tries them in that order; each rejection takes the token out
of the draft's distribution and turns the target's into what is left of it (:mod:`aparte.rejection`). Of all
that could be added next, the one goes in that most likely is accepted: a further sibling where the draft is
unsure, a token further down where it is sure. So it is a chain where that is best.

What is drawn is always sent, and whether to draw is decided before: by places, by what they hold so far and
by estimates for draws of that kind, never by the token that comes out. That is what makes it exact.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aparte.config import Sampling
from aparte.distribution import Distribution
from aparte.rejection import draw_in_tree
from aparte.sampling import process
from aparte.speculate.calibration import Calibration
from aparte.speculate.chain import SURE
from aparte.speculate.common import CommonTable
from aparte.speculate.drafter import Outcome, wanted_likely
from aparte.speculate.length import LengthPlan
from aparte.speculate.neural import WIDTH, TreeModel
from aparte.speculate.outstanding import Outstanding
from aparte.speculate.reader import Reader
from aparte.speculate.source import Candidate, Source
from aparte.speculate.tree import BELOW_ROOT, DraftTree
from aparte.speculate.voice import EDGES, open_source

#: First guess of the chance that a sibling is accepted after others were rejected.
LATER = 0.3
#: Less likely nodes are not worth a place.
LEAST = 0.01
#: Ranks among siblings that estimates tell apart, and depths.
RANKS, DEPTHS = 3, 3
#: The token of an estimate that is not about a certain one.
_ANY = -1


@dataclass(frozen=True)
class _Offer:
    """What could be added at a place: the chance that it is accepted there, and what that goes by.

    ``token`` is None if it is to be drawn.
    """

    chance: float
    basis: Candidate
    token: int | None


@dataclass
class _Place:
    """Where children may hang: below ``node``, which is on the accepted path with chance ``reached``."""

    node: int
    depth: int
    reached: float
    at: list[Any]  # the place of each source
    named: list[Candidate]
    read: bool  # or there is nothing to read
    #: The model that is the surest here, its distribution, and what can be drawn, in that order once it is.
    who: str = ""
    sure: float = 0.0
    q: Distribution | None = None
    possible: tuple[int, ...] = ()
    ordered: bool = False
    #: Children so far, in the order of trying, and the chance that the node is reached and none is accepted.
    children: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    left: float = 1.0
    offer: _Offer | None = None


@dataclass
class _Proposal:
    context: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    drawn: list[Distribution] = field(default_factory=list)
    #: What each node's estimates went by: before its token was known and, if it was drawn, after.
    bases: list[tuple[Candidate, ...]] = field(default_factory=list)
    places: dict[int, _Place] = field(default_factory=dict)
    passes: int = 0
    reading_ms: float = 0.0
    ended_at: float = 0.0
    #: Whether another step was under way when this one was proposed: then its time says nothing.
    overlaps: bool = False

    def tree(self) -> DraftTree:
        return DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.chances), tuple(self.drawn))


class DrawnTree:
    """A drafter of trees for acceptance by rejection sampling."""

    runs_ahead = True

    def __init__(
        self,
        sources: Sequence[Source],
        models: Mapping[str, TreeModel],
        sampling: Sampling,
        *,
        size: int | None = None,
        width: int = 8,
        eos: frozenset[int] = frozenset(),
        plan: LengthPlan | None = None,
        calibration: Calibration | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``size`` is the number of nodes; None decides it step by step. ``width`` is the most tokens that a
        draw is made from. Nothing is drafted after a token of ``eos``. ``plan`` and ``calibration`` are what
        was learned before, of the link and of how often drafts are right. ``clock`` gives seconds.

        Raises ``ValueError`` for greedy ``sampling``.
        """
        if sampling.greedy:
            raise ValueError("nothing is drawn for greedy text")
        self._sources = tuple(sources)
        self.likely = wanted_likely(self._sources)
        self._readers = [Reader(name, model) for name, model in models.items()]
        self._sampling = sampling
        self._size = size
        self._width = width
        self._eos = eos
        self._clock = clock
        self.plan = plan or LengthPlan()
        self.calibration = calibration or Calibration()
        self._proposals: Outstanding[_Proposal] = Outstanding()

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        proposal = _Proposal(tuple(context), overlaps=self._proposals.begin(context))
        self._proposals.add(context, proposal)
        for reader in self._readers:
            reader.begin(proposal.context)
        self._open(proposal, BELOW_ROOT, 0, 1.0, [source.start(context) for source in self._sources])
        most = budget if self._size is None else min(budget, self._size)
        while len(proposal.tokens) < most and self._grow(proposal):
            pass
        proposal.ended_at = self._clock()
        self.plan.drafted(proposal.passes, proposal.reading_ms)
        return proposal.tree()

    def observe(self, outcome: Outcome) -> None:
        proposal = self._proposals.settle(outcome)
        if not proposal.overlaps and not self._proposals:
            # Nothing else was under way: the time since is that of the step.
            ms = (self._clock() - proposal.ended_at) * 1e3
            self.plan.verified(len(outcome.tree), ms, outcome.cloud_ms)
        node = BELOW_ROOT
        # The loop may have cut the tree, so the path is followed by its tokens.
        for depth, choice in enumerate(outcome.accepted.tokens):
            place = proposal.places.get(node)
            if place is None:
                break
            right = None
            for child in place.children:
                hit = proposal.tokens[child] == choice
                if depth >= outcome.known:  # what came out before was not judged here
                    for basis in proposal.bases[child]:
                        self.calibration.record(basis, hit)
                    if child == place.children[0]:
                        self.plan.judged(hit)
                if hit:
                    right = child
                    break
            if right is None:
                break
            node = right
        for source in self._sources:
            source.learn(proposal.context, outcome)

    def _grow(self, proposal: _Proposal) -> bool:
        """Add the most promising node, or read on for it. False if nothing is worth while any more."""
        best, best_gain = None, LEAST
        for place in proposal.places.values():
            gain = place.left * self._hope(place)
            if gain > best_gain:
                best, best_gain = place, gain
        if best is None:
            return False
        if self._wants_reading(best):
            self._read(proposal)
            return True
        if not self._pays(proposal, best_gain, 1, 0.0):
            return False
        assert best.offer is not None
        self._add(proposal, best, best.offer)
        return True

    def _hope(self, place: _Place) -> float:
        """The chance that what could be added at ``place`` next is accepted, if it is tried."""
        offered = 0.0 if place.offer is None else place.offer.chance
        if place.read or offered >= SURE:
            return offered
        return max(offered, LATER if place.children else self.plan.chance)

    def _wants_reading(self, place: _Place) -> bool:
        return not place.read and (place.offer is None or place.offer.chance < SURE)

    def _pays(self, proposal: _Proposal, gain: float, nodes: int, edge_ms: float) -> bool:
        if self._size is not None:
            return True
        tokens = 1.0 + sum(proposal.chances)
        return self.plan.pays(
            gain, nodes, edge_ms, tokens, len(proposal.tokens), proposal.passes * self.plan.edge_ms
        )

    def _read(self, proposal: _Proposal) -> None:
        """Ask the models at the places where that promises most; or at none of them, if it doesn't pay."""
        waiting = [place for place in proposal.places.values() if self._wants_reading(place)]
        waiting.sort(key=lambda place: -place.left * self._hope(place))
        best = [place for place in waiting[:WIDTH] if place.left * self._hope(place) > LEAST]
        gain = sum(place.left * self._hope(place) for place in best)
        if not self._pays(proposal, gain, len(best), self.plan.edge_ms):
            for place in proposal.places.values():
                place.read = True
            return
        started = self._clock()
        for reader in self._readers:
            nodes = [place.node for place in best if place.node != BELOW_ROOT]
            proposal.passes += reader.read(nodes, proposal.tokens, proposal.parents)
        for place in best:
            self._hear(place)
        proposal.reading_ms += (self._clock() - started) * 1e3

    def _hear(self, place: _Place) -> None:
        """Take the distribution of the model that is the surest at ``place``."""
        place.read = True
        for reader in self._readers:
            said = reader.said(place.node)
            if not said or max(said.values()) <= place.sure:
                continue
            found = sorted(said.items(), key=lambda pair: -pair[1])[: self._width]
            priors = torch.tensor([probability for _, probability in found])
            shares = process(priors.log()[None], self._sampling)[0].softmax(dim=-1)
            place.who, place.sure = reader.name, max(said.values())
            q = place.q = Distribution(tuple(token for token, _ in found), tuple(shares.tolist()))
            place.possible = tuple(
                token for token, share in zip(q.tokens, q.probabilities, strict=True) if share > 0
            )
        place.offer = self._offer(place)

    def _open(self, proposal: _Proposal, node: int, depth: int, reached: float, at: list[Any]) -> None:
        """A new place. Sources are asked at once, models when it is worth it."""
        named = [
            candidate
            for source, place in zip(self._sources, at, strict=True)
            for candidate in source.candidates(place)
        ]
        place = _Place(node, depth, reached, at, named, read=not self._readers, left=reached)
        place.offer = self._offer(place)
        proposal.places[node] = place

    def _offer(self, place: _Place) -> _Offer | None:
        """The most promising next child of ``place``; what is drawn is looked at afterwards."""
        rank = min(len(place.children), RANKS - 1)
        best: _Offer | None = None
        for candidate in place.named:
            if candidate.token not in place.tried:
                basis = Candidate(candidate.token, ("rejection", rank, *candidate.kind), candidate.prior)
                chance = self.calibration.probability(basis)
                if best is None or chance > best.chance:
                    best = _Offer(chance, basis, candidate.token)
        if any(token not in place.tried for token in place.possible):
            kind = ("rejection", rank, place.who, bisect_right(EDGES, place.sure), min(place.depth, DEPTHS))
            basis = Candidate(_ANY, kind, LATER if rank else place.sure)
            chance = self.calibration.probability(basis)
            if best is None or chance > best.chance:
                best = _Offer(chance, basis, None)
        return best

    def _add(self, proposal: _Proposal, place: _Place, offer: _Offer) -> None:
        """Name or draw the next child of ``place``."""
        token = offer.token
        bases: tuple[Candidate, ...] = (offer.basis,)
        if token is None:
            assert place.q is not None
            q = place.q
            if not place.ordered:
                position, number = len(proposal.context), 1 + place.node
                place.possible = draw_in_tree(q, seed=self._sampling.seed, position=position, place=number)
                place.ordered = True
            token = next(token for token in place.possible if token not in place.tried)
            # How the draft likes what came out tells how likely it is accepted, now that it is in the tree.
            shares = dict(zip(q.tokens, q.probabilities, strict=True))
            share = shares[token] / max(1e-9, sum(shares[one] for one in shares if one not in place.tried))
            rank = min(len(place.children), RANKS - 1)
            bases += (Candidate(_ANY, ("drawn", rank, place.who, bisect_right(EDGES, share)), offer.chance),)
        else:
            q = Distribution.only(token)
        chance = self.calibration.probability(bases[-1])
        node, reached = len(proposal.tokens), place.left * chance
        proposal.tokens.append(token)
        proposal.parents.append(place.node)
        proposal.chances.append(reached)
        proposal.drawn.append(q)
        proposal.bases.append(bases)
        place.children.append(node)
        place.tried.append(token)
        place.left *= 1 - chance
        place.offer = self._offer(place)
        if token not in self._eos:
            moved = [source.advance(at, token) for source, at in zip(self._sources, place.at, strict=True)]
            self._open(proposal, node, place.depth + 1, reached, moved)


def open_drawn_tree(
    names: Sequence[str], models: Mapping[str, TreeModel | CommonTable], sampling: Sampling, **more: Any
) -> DrawnTree:
    """One of the sources of those names; ``models`` holds what had to be loaded, ``more`` goes on to it."""
    tables = {name: model for name, model in models.items() if isinstance(model, CommonTable)}
    readable = {name: model for name, model in models.items() if not isinstance(model, CommonTable)}
    sources = [open_source(name, tables.get(name)) for name in names if name not in readable]
    return DrawnTree(sources, {name: readable[name] for name in names if name in readable}, sampling, **more)
