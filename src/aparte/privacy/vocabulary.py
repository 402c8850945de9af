"""Vocabulary matching: with the front's public weights, find the tokens one after the other.

Sources: arXiv 2505.18332 (vocabulary matching), SipIt (arXiv 2510.15511). For each position, candidates
are run below the recovered prefix until one gives the state that was received. Assumptions: the public
front. Cost: a linear solve on a few thousand tokens of any text, then a few passes of the front per text.

Three things make it fast. A closed-form inverter names candidates in a good order. A whole chain of its
first choices is run in one pass, and the prefix is extended by as many as match. Only where none matches
are siblings run, 15 first, then more, in the end the whole vocabulary. Where nothing matches below the first
token, other first tokens with states like the one received are tried.

Rounding on the wire only widens the distance at which a state matches; the attacker learns it in a trial on
its own text. Where noise or coarse rounding make right and wrong candidates overlap there, it takes the most
probable one instead: ``-|F(v) - h|^2 / 2 s^2 + log p(v | prefix)``, with the public model as the prior.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from aparte.config import Cut
from aparte.privacy.attack import Case, Recovered, Target, total
from aparte.privacy.defences import Pinned
from aparte.privacy.matching import Matcher, relative
from aparte.privacy.metrics import RANKS
from aparte.privacy.observe import Observer, Seen
from aparte.privacy.specimen import PACK, Specimen
from aparte.step import ROOT, Step

#: Own text for the inverter: more improves the order of candidates, hardly what is found.
TOKENS = 6000
#: First choices that are run in one chain.
CHAIN = 32
#: Ranks at which the search among siblings pauses to see whether one matches.
WIDTHS = (16, 128, 1024, 4096)
#: The same where a state may match nothing, and the whole vocabulary would be searched for each.
SOME = WIDTHS[:3]
#: Candidates per position where distances alone do not decide.
CANDIDATES = 64
#: First tokens that are tried anew if nothing matches below the one chosen, and tokens below each of them.
OPENINGS = 2048
SECONDS = 3
#: If the nearest token is so many times farther off than is accepted, the prefix is wrong.
ASTRAY = 16
#: Tokens by which it tells at which of several cuts a session was.
PROBE = 8


class Found(NamedTuple):
    """Ranked tokens ``[T, RANKS]``, the mean relative distance of the first ones, and each one's."""

    ranked: torch.Tensor
    distance: float
    distances: list[float]


class Vocabulary:
    """Exact recovery with the front's weights, at any depth."""

    name = "vocabulary"
    target: Target = "prompt"
    threat = "public"
    source = "arXiv 2505.18332; SipIt, arXiv 2510.15511."
    assumes = "The public weights of the front, and any text (to order candidates)."
    cost = "A linear solve, then a few passes of the front per text."

    def __init__(self, doubtful: int | None = None, widths: tuple[int, ...] = ()) -> None:
        """Where distances alone do not decide, only the first ``doubtful`` texts are attacked, if set.

        With ``widths``, against devices whose states may match nothing, the search ends at the last of them,
        and those texts have to do too.
        """
        self._doubtful = doubtful
        self._widths = widths

    def run(self, case: Case) -> Recovered:
        matchers, seconds, tokens = self._prepare(case)
        exact = all(matcher.rest.accept is not None for matcher in matchers)
        victims = case.victims if exact and not self._widths else case.victims[: self._doubtful]
        started = time.perf_counter()
        guesses = []
        for place, seen in enumerate(victims):
            case.progress("vocabulary matching", place, len(victims))
            guesses.append(self._recover(matchers, seen).ranked)
        case.progress("vocabulary matching", len(victims), len(victims))
        seconds += time.perf_counter() - started
        return Recovered(guesses, tokens, seconds, {"by": "distance" if exact else "probability"})

    def _prepare(self, case: Case) -> tuple[list[Matcher], float, int]:
        cuts = case.observer.defence.cuts(case.observer.cut)
        if len(cuts) == 1:
            sessions = case.pairs(TOKENS)
            started = time.perf_counter()
            matchers = [Matcher(case.observer, sessions, case.seed)]
            return matchers, time.perf_counter() - started, total(sessions)
        started, tokens = time.perf_counter(), 0
        matchers = []
        for cut in cuts:
            observer = _pinned(case.observer, cut)
            own = Case(observer, (), case.corpus, min(case.tokens, TOKENS), case.progress, case.seed)
            matchers.append(Matcher(observer, own.pairs(), case.seed))
            tokens = max(tokens, total(own.pairs()))
        return matchers, time.perf_counter() - started, tokens

    def _recover(self, matchers: list[Matcher], seen: Seen) -> Found:
        if len(matchers) > 1:
            start = seen.up[:PROBE]
            matchers = [min(matchers, key=lambda matcher: match(matcher, start, WIDTHS[:2]).distance)]
        return match(matchers[0], seen.up, self._widths)


def match(matcher: Matcher, up: torch.Tensor, widths: tuple[int, ...] = ()) -> Found:
    """Recover the tokens behind the states ``up`` ``[T, D]``.

    With ``widths`` the search among siblings ends at the last of them; without, at the vocabulary's end.
    """
    search = _Search(matcher, up, widths)
    while search.position < len(up):
        search.advance()
    return Found(torch.stack(search.ranked), sum(search.distances) / len(up), search.distances)


class _Search:
    """The search in one text: what is recovered so far, and how to go on."""

    def __init__(self, matcher: Matcher, up: torch.Tensor, widths: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._widths = widths
        self._up = up.float()
        self._prefix = matcher.prefix()
        self._scores = matcher.scores(self._up)  # [T, V]
        self._choices = self._scores.topk(RANKS).indices  # [T, RANKS]
        self._prior: _Prior | None = None
        #: Whether nothing was near the newest state that was looked for, so that its prefix is wrong.
        self._astray = False
        self.ranked: list[torch.Tensor] = []
        self.distances: list[float] = []

    @property
    def position(self) -> int:
        return len(self.ranked)

    def advance(self) -> None:
        """Recover one position, or several at once."""
        tolerance = self._matcher.tolerance(self.position)
        if tolerance.accept is None and self.position:
            self._most_probable(tolerance.variance)
        elif self._matcher.rest.accept is None or not self._chain():
            self._nearest(tolerance.accept)

    def _chain(self) -> bool:
        """Keep the first choices for as long as they match; whether the first of them did."""
        chain = self._choices[self.position : self.position + CHAIN, 0]
        received = self._up[self.position : self.position + len(chain)]
        distances = relative(self._prefix.chain(chain), received).tolist()
        matching = 0
        for offset, distance in enumerate(distances):
            accept = self._matcher.tolerance(self.position).accept
            if accept is None or distance > accept:
                break
            matching = offset + 1
            self._add(self._choices[self.position], distance)
        if matching:
            self._prefix.keep(matching - 1)
        return matching > 0

    def _nearest(self, accept: float | None) -> None:
        """Run siblings in the inverter's order until one matches, and keep the nearest."""
        received = self._up[self.position]
        order = self._scores[self.position].argsort(descending=True)
        near, start = [], 0
        for width in self._widths_of(len(order), accept):
            doubt = self.position == 1 and accept is not None and start >= min(SOME[-1], len(order))
            if doubt and len(others := self._other_firsts()):
                if self._reopened(others, accept or 0.0):
                    return
                break  # the first one may well be wrong, and then nothing matches
            tokens = order[start:width]
            if not len(tokens):
                break
            run = self._prefix.siblings if self.position else self._matcher.first_states
            states = torch.cat([run(part) for part in torch.split(tokens, PACK)])
            near.append((tokens, relative(states, received)))
            start = width
            if accept is not None and float(near[-1][1].min()) <= accept:
                break
        tokens, distances = (torch.cat(parts) for parts in zip(*near, strict=True))
        self._astray = accept is not None and float(distances.min()) > ASTRAY * accept
        best = distances.topk(min(RANKS, len(tokens)), largest=False)
        self._keep(tokens[best.indices], float(best.values[0]))

    def _widths_of(self, vocabulary: int, accept: float | None) -> tuple[int, ...] | Iterator[int]:
        """How many siblings to run before each pause."""
        if self._widths:
            return self._widths
        # Without a distance to accept nothing says when to stop, and the first thousand have to do. Where the
        # prefix went wrong a hundred have to, as nothing after it will match.
        if self._astray and self.position > 1:
            return WIDTHS[:2]
        return SOME if accept is None else _widths(vocabulary)

    def _other_firsts(self) -> torch.Tensor:
        """First tokens ``[n]`` that match what was received as well, the nearest first.

        First states are so much alike that coarse rounding makes many of them equal.
        """
        everything = torch.arange(self._scores.shape[1])
        states = torch.cat([self._matcher.first_states(part) for part in torch.split(everything, PACK)])
        distances = relative(states, self._up[0])
        accept = self._matcher.first.accept
        matching = len(everything) if accept is None else int((distances <= accept).sum())
        firsts = distances.argsort()[: min(matching, OPENINGS)]
        return firsts[firsts != self.ranked[0][0]]

    def _reopened(self, firsts: torch.Tensor, accept: float) -> bool:
        """Whether one of ``firsts`` is followed by a token that matches: if so, both are kept."""
        seconds = self._scores[1].argsort(descending=True)
        for second in seconds[:SECONDS]:
            for part in torch.split(firsts, PACK // 2):
                below = relative(self._matcher.prefix().below(part, second), self._up[1])
                if float(below.min()) <= accept:
                    self._begin(part[below.argmin()])
                    others = seconds[:RANKS][seconds[:RANKS] != second]
                    self._keep(torch.cat([second[None], others]), float(below.min()))
                    self._astray = False
                    return True
        return False

    def _begin(self, first: torch.Tensor) -> None:
        """Start over, with another first token."""
        others = self.ranked[0][self.ranked[0] != first]
        distance = float(relative(self._matcher.first_states(first[None]), self._up[0])[0])
        self.ranked, self.distances, self._prefix = [], [], self._matcher.prefix()
        self._keep(torch.cat([first[None], others]), distance)

    def _most_probable(self, variance: float) -> None:
        """Weigh the distance of each likely candidate against what language makes of it."""
        prior = self._following()
        posterior = self._scores[self.position] + prior
        tokens = posterior.topk(min(CANDIDATES, len(posterior))).indices
        distances = relative(self._prefix.siblings(tokens), self._up[self.position])
        values = prior[tokens] - distances.square() / (2 * variance)
        best = values.topk(min(RANKS, len(tokens))).indices
        self._keep(tokens[best], float(distances[best[0]]))

    def _following(self) -> torch.Tensor:
        """Log-probabilities ``[V]`` of the next token after what is recovered."""
        if self._prior is None:
            self._prior = _Prior(self._matcher.specimen)
        return self._prior.after([int(ranked[0]) for ranked in self.ranked])

    def _keep(self, ranked: torch.Tensor, distance: float) -> None:
        self._prefix.siblings(ranked[:1])
        self._prefix.keep(0)
        self._add(ranked, distance)

    def _add(self, ranked: torch.Tensor, distance: float) -> None:
        if len(ranked) < RANKS:
            ranked = torch.cat([ranked, ranked.new_full((RANKS - len(ranked),), -1)])
        self.ranked.append(ranked[:RANKS])
        self.distances.append(distance)


class _Prior:
    """The public model's next-token distribution along a growing text."""

    def __init__(self, specimen: Specimen) -> None:
        self._specimen = specimen
        self._run = specimen.run(range(specimen.layers))
        self._done = 0

    def after(self, tokens: list[int]) -> torch.Tensor:
        new = torch.tensor(tokens[self._done :])
        parents = tuple(range(self._done - 1, len(tokens) - 1))
        step = Step(self._done, 0, self._done - 1 if self._done else ROOT, self._done, parents)
        hidden = self._run.forward(step, self._specimen.embedding(new))
        self._done = len(tokens)
        return self._specimen.head(hidden[-1:])[0].cpu().log_softmax(0)


def _pinned(observer: Observer, cut: Cut) -> Observer:
    return Observer(
        observer.specimen, cut, observer.wire, Pinned(observer.defence, cut), observer.seed + 2_000_003
    )


def _widths(size: int) -> Iterator[int]:
    """Ranks at which to pause, up to the end of a vocabulary of ``size``."""
    yield from WIDTHS
    yield from range(2 * WIDTHS[-1], size + WIDTHS[-1], WIDTHS[-1])
