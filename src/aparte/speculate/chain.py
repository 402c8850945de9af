"""Drafting one chain, as a small model on the edge does for a verifier in the cloud (SPADE, paper B).

How a token is picked follows from how it will be accepted. *Greedy*: the likeliest. *Coupled*: the argument
of the maximum of the draft's processed logits and the very noise that the verifier adds to its own, so that
both agree far more often than two samples would. *Rejection*: drawn, with noise of its own, from the draft's
distribution over the tokens it names, which goes along with the draft.

For rejection, whether one more token is drawn may depend on the path so far, and what is drawn is always
sent: a decision that looks at the token it drops would bias the text (:mod:`aparte.rejection`). The length is
decided like that in every mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from aparte.config import Sampling
from aparte.distribution import Distribution
from aparte.rejection import draw
from aparte.sampling import gumbel_noise, process
from aparte.speculate.calibration import Calibration
from aparte.speculate.drafter import Outcome, wanted_likely
from aparte.speculate.length import LengthPlan
from aparte.speculate.outstanding import Outstanding
from aparte.speculate.source import Candidate
from aparte.speculate.tree import BELOW_ROOT, DraftTree
from aparte.speculate.voice import Voice

#: Where a source is as sure as this, models are not asked.
SURE = 0.75


@dataclass
class _Link:
    """One token of a chain: what it was picked by, and, if drawn, from what."""

    token: int
    basis: Candidate
    drawn: Distribution | None


@dataclass
class _Proposal:
    context: tuple[int, ...]
    links: list[_Link] = field(default_factory=list)
    ended_at: float = 0.0
    #: Whether another step was under way when this one was proposed: then its time says nothing.
    overlaps: bool = False


class Chain:
    """A drafter of one chain per step, by whichever voice is the surest at each place."""

    runs_ahead = True

    def __init__(
        self,
        voices: Sequence[Voice],
        sampling: Sampling,
        *,
        rejection: bool = False,
        length: int | None = None,
        width: int = 8,
        eos: frozenset[int] = frozenset(),
        plan: LengthPlan | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``length`` None decides it step by step. ``width`` is the most tokens a draw is made from.

        Nothing is drafted after a token of ``eos``. ``plan`` is what was learned of the link before.
        ``clock`` gives seconds.
        """
        self._voices = tuple(voices)
        self.likely = wanted_likely(self._voices)
        self._sampling = sampling
        self._rejection = rejection and not sampling.greedy
        self._length = length
        self._width = width
        self._eos = eos
        self._clock = clock
        self.plan = plan or LengthPlan()
        self.calibration = Calibration()
        self._proposals: Outstanding[_Proposal] = Outstanding()

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        started = self._clock()
        proposal = _Proposal(tuple(context), overlaps=self._proposals.begin(context))
        self._proposals.add(context, proposal)
        for voice in self._voices:
            voice.begin(proposal.context)
        reached, tokens = 1.0, 1.0
        chances: list[float] = []
        while len(proposal.links) < budget and self._goes_on(proposal.links, reached, tokens):
            link = self._next(len(context) + len(proposal.links))
            if link is None:
                break
            proposal.links.append(link)
            reached *= self.calibration.probability(link.basis)
            tokens += reached
            chances.append(reached)
            for voice in self._voices:
                voice.follow(link.token)
        proposal.ended_at = self._clock()
        self.plan.drafted(len(chances), (proposal.ended_at - started) * 1e3)
        return DraftTree(
            tuple(link.token for link in proposal.links),
            tuple(range(BELOW_ROOT, len(chances) - 1)),
            tuple(chances),
            tuple(link.drawn for link in proposal.links if link.drawn is not None),
        )

    def observe(self, outcome: Outcome) -> None:
        proposal = self._proposals.settle(outcome)
        if not proposal.overlaps and not self._proposals:
            # Nothing else was under way: the time since is that of the step.
            ms = (self._clock() - proposal.ended_at) * 1e3
            self.plan.verified(len(outcome.tree), ms, outcome.cloud_ms)
        accepted = len(outcome.accepted.path)
        for depth, link in enumerate(proposal.links[: len(outcome.tree)]):
            if depth > accepted:
                break
            if depth >= outcome.known:  # what came out before was counted then
                self.plan.judged(depth < accepted)
                self.calibration.record(link.basis, depth < accepted)
        for voice in self._voices:
            voice.learn(proposal.context, outcome)

    def _goes_on(self, links: Sequence[_Link], reached: float, tokens: float) -> bool:
        if links and links[-1].token in self._eos:
            return False
        if self._length is not None:
            return len(links) < self._length
        return self.plan.goes_on(len(links), reached, tokens)

    def _next(self, position: int) -> _Link | None:
        """The token for ``position`` of the text, from the voice whose best token is the surest."""
        best: tuple[float, Voice, Candidate, list[Candidate]] | None = None
        for voice in sorted(self._voices, key=lambda voice: voice.is_model):
            if best is not None and voice.is_model and best[0] >= SURE:
                break
            candidates = voice.candidates()
            if not candidates:
                continue
            first = self._basis(max(candidates, key=self._estimate if not voice.is_model else _prior))
            chance = self.calibration.probability(first)
            if best is None or chance > best[0]:
                best = chance, voice, first, candidates
        if best is None:
            return None
        _, voice, basis, candidates = best
        if self._sampling.greedy:
            return _Link(basis.token, basis, None)
        if not voice.is_model:  # no distribution: its best token, named for sure
            return _Link(basis.token, basis, Distribution.only(basis.token) if self._rejection else None)
        tokens = [candidate.token for candidate in candidates[: self._width]]
        priors = torch.tensor([candidate.prior for candidate in candidates[: self._width]])
        logits = process(priors.log()[None], self._sampling)[0]
        if self._rejection:
            drawn = Distribution(tuple(tokens), tuple(logits.softmax(dim=-1).tolist()))
            (token,) = draw(drawn, 1, seed=self._sampling.seed, position=position)
            return _Link(token, basis, drawn)
        noise = gumbel_noise(self._sampling.seed, position, max(tokens) + 1)[tokens]
        return _Link(tokens[int((logits + noise).argmax())], basis, None)

    def _basis(self, candidate: Candidate) -> Candidate:
        """What a pick at this place goes by. It does not tell which token was drawn."""
        if self._sampling.greedy:
            return candidate
        mode = "rejection" if self._rejection else "coupled"
        return Candidate(candidate.token, (mode, *candidate.kind), candidate.prior)

    def _estimate(self, candidate: Candidate) -> float:
        return self.calibration.probability(self._basis(candidate))


def _prior(candidate: Candidate) -> float:
    return candidate.prior
