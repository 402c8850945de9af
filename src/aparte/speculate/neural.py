"""The source behind which a neural model drafts: asked level by level, many nodes at a time.

Other sources are asked node by node, which costs them microseconds. A model's pass costs milliseconds and
hardly more for eight nodes than for one. So the tree is grown here, before anybody asks: every pass hangs
the most probable nodes that have no continuation yet below their parents (EAGLE-2 grows its trees like
that), and goes on while a further pass is worth its time.
"""

from __future__ import annotations

import heapq
import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from aparte.speculate.calibration import Calibration
from aparte.speculate.drafter import Outcome
from aparte.speculate.pace import Pace, Patience
from aparte.speculate.source import Candidate
from aparte.speculate.tree import BELOW_ROOT

log = logging.getLogger(__name__)

#: Nodes per pass and passes per tree, at most.
WIDTH = 6
DEPTH = 8
#: Nodes less likely than this to lie on the accepted path are not worth a row of a pass.
MIN_PROBABILITY = 0.01
#: Classes of the model's probability. Finer near 0 and 1, where being wrong costs most.
_EDGES = (0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96, 0.99)
#: A model that fails so many times in a row is left alone.
MAX_FAILURES = 3
#: Proposals whose outcome may still be to come (pipelining); older ones are forgotten.
_OUTSTANDING = 16


@dataclass(frozen=True)
class Guess:
    """What may come next at one place, best first."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


class TreeModel(Protocol):
    """A model that continues a context, and then many branches below it at a time."""

    def begin(self, context: Sequence[int]) -> Guess | None:
        """What comes after the context's last token, the pending one. Forgets the tree of the last begin.

        None if the model cannot start there.
        """
        ...

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        """Hang ``tokens`` below earlier nodes, -1 being the pending token; what comes after each.

        Nodes are numbered in the order in which they are given since ``begin``.
        """
        ...


@dataclass
class _Draft:
    """What the model said below one context; nodes are the model's."""

    said: dict[int, list[Candidate]] = field(default_factory=dict)
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # by (parent, token)
    chances: dict[int, float] = field(default_factory=lambda: {BELOW_ROOT: 1.0})
    depths: dict[int, int] = field(default_factory=lambda: {BELOW_ROOT: 0})


class Neural:
    """A source. Places are the model's nodes; None is everywhere that the model did not look at.

    A model that errs, whether in what it returns or by raising, costs proposals and nothing else.
    """

    def __init__(
        self,
        name: str,
        model: TreeModel,
        *,
        width: int = WIDTH,
        depth: int = DEPTH,
        clock: Callable[[], float] = time.perf_counter,
        patient: bool = False,
    ) -> None:
        """``clock`` gives seconds. ``patient`` is drafting that may take its time."""
        self._name = name
        self._model = model
        self._width = width
        self._depth = depth
        # The merged tree calibrates for itself; here it decides which nodes are looked at, and how far.
        self._calibration = Calibration()
        self.pace = Patience(clock) if patient else Pace(clock)
        self._failures = 0
        self._draft = _Draft()
        self._waiting_for_outcome: OrderedDict[tuple[int, ...], _Draft] = OrderedDict()

    def start(self, context: Sequence[int]) -> int | None:
        self._draft = draft = _Draft()
        if self._failures >= MAX_FAILURES or not self.pace.is_worth_drafting():
            return None
        with self.pace.drafting(len(context)):
            try:
                self._grow(draft, context)
                self._failures = 0
            except Exception as error:  # whatever it is, the text does not depend on it
                self._failures += 1
                log.warning(
                    "The %s drafter failed (%s)%s.",
                    self._name,
                    type(error).__name__,
                    ", and is left alone from now on" if self._failures == MAX_FAILURES else "",
                )
        if not draft.said:
            return None
        self._waiting_for_outcome[tuple(context)] = draft
        if len(self._waiting_for_outcome) > _OUTSTANDING:
            self._waiting_for_outcome.popitem(last=False)
        return BELOW_ROOT

    def candidates(self, place: int | None) -> list[Candidate]:
        return [] if place is None else self._draft.said.get(place, [])

    def advance(self, place: int | None, token: int) -> int | None:
        return None if place is None else self._draft.nodes.get((place, token))

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        tokens = outcome.accepted.tokens
        draft = self._waiting_for_outcome.pop(tuple(context), None)
        # A proposal that was sent ahead begins with a token that the outcome before told already.
        self.pace.step(len(context) + outcome.known, len(tokens) - outcome.known)
        if draft is None:
            return
        node: int | None = BELOW_ROOT
        foreseen = 0
        for depth, choice in enumerate(tokens):
            said = [] if node is None else draft.said[node]
            if not said:
                break
            if depth >= outcome.known:
                for candidate in said:
                    self._calibration.record(candidate, candidate.token == choice)
                self.pace.best_guess(said[0].token == choice)
            foreseen += any(candidate.token == choice for candidate in said)
            node = None if node is None else draft.nodes.get((node, choice))
        # The target's own token comes without a drafter too, and so does what was not sent.
        foreseen = max(0, min(foreseen, len(outcome.accepted.path)) - outcome.known)
        self.pace.foreseen(foreseen, foreseen if outcome.gained is None else min(foreseen, outcome.gained))

    def _grow(self, draft: _Draft, context: Sequence[int]) -> None:
        first = self._model.begin(context)
        if first is None:
            return
        age = count()
        waiting: list[tuple[float, int, int, int]] = []  # (-p of the path, age, parent, token)

        def say(node: int, guess: Guess) -> None:
            draft.said[node] = self._candidates(guess, draft.depths[node])
            for candidate in draft.said[node]:
                chance = draft.chances[node] * self._calibration.probability(candidate)
                if chance >= MIN_PROBABILITY:
                    heapq.heappush(waiting, (-chance, next(age), node, candidate.token))

        say(BELOW_ROOT, first)
        given = 0
        for _ in range(self._depth):
            best = [heapq.heappop(waiting) for _ in range(min(self._width, len(waiting)))]
            if not best or not self.pace.is_worth_a_level(-sum(negative for negative, *_ in best)):
                return
            with self.pace.level():
                guesses = self._model.extend([item[2] for item in best], [item[3] for item in best])
            if len(guesses) != len(best):
                raise ValueError("the model returned guesses for another number of nodes")
            for (negative, _, parent, token), guess in zip(best, guesses, strict=True):
                node, given = given, given + 1
                draft.nodes[parent, token] = node
                draft.chances[node] = -negative
                draft.depths[node] = draft.depths[parent] + 1
                say(node, guess)

    def _candidates(self, guess: Guess, depth: int) -> list[Candidate]:
        """The usable part of a guess: each token once, with a probability that is one."""
        found: dict[int, Candidate] = {}
        for token, probability in zip(guess.tokens, guess.probabilities, strict=False):
            # A comparison with NaN is false.
            if type(token) is int and token >= 0 and token not in found and 0 <= probability <= 1:
                rank = min(len(found), 2)
                kind = (self._name, rank, bisect_right(_EDGES, probability), _depth_class(depth))
                found[token] = Candidate(token, kind, float(probability))
        return list(found.values())


def _depth_class(depth: int) -> int:
    """The further a model goes on from its own guesses, the less it is to be trusted."""
    return 0 if depth == 0 else 1 if depth <= 2 else 2
