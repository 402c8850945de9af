"""The *context* source: what followed the same words earlier in prompt, conversation and answer.

Longest match first; prompt lookup is its simplest setting.
"""

from __future__ import annotations

from collections.abc import Sequence

from aparte.speculate.drafter import Outcome
from aparte.speculate.source import Candidate
from aparte.speculate.suffixes import ROOT, SuffixAutomaton

#: Shorter matches that are looked at besides the longest one.
_BACKOFFS = 5
#: Candidates taken per match.
_PER_MATCH = 3
#: First guesses by length of the match, until there is experience.
_PRIORS = ((16, 0.9), (8, 0.8), (5, 0.7), (4, 0.6), (3, 0.5), (2, 0.4), (1, 0.2))

Place = tuple[int, int]  # automaton state, length of the match


class Context:
    """A suffix automaton over everything that was said."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self._text: list[int] = []
        self._asked: list[int] = []  # the longest context asked about that learn() has not confirmed

    def start(self, context: Sequence[int]) -> Place:
        if list(context[: len(self._text)]) != self._text:  # another conversation, or an edited one
            self.__init__()  # type: ignore[misc]
        if not self._asked:  # else the context may run ahead, on guesses; learn() will tell
            self._append(context)
        self._asked = list(context)
        state = self._automaton.longest_repeat
        place = state, self._automaton.length(state)
        for token in context[len(self._text) :]:
            place = self.advance(place, token)
        return place

    def candidates(self, place: Place) -> list[Candidate]:
        state, length = place
        found: dict[int, Candidate] = {}
        for _ in range(_BACKOFFS):
            if state in (ROOT, -1):
                break
            counts = self._automaton.followed(state)
            total = sum(counts.values())
            # Most frequent first; of equals the one seen last, which the automaton keeps last.
            newest_first = list(counts.items())[::-1]
            ranked = sorted(newest_first, key=lambda item: -item[1])[:_PER_MATCH]
            for rank, (token, count) in enumerate(ranked):
                if token not in found:
                    share = count / total
                    kind = ("context", _length_class(length), rank, _share_class(share))
                    found[token] = Candidate(token, kind, _prior(length) * share)
            state = self._automaton.link(state)
            length = self._automaton.length(state) if state != -1 else 0
        return list(found.values())

    def advance(self, place: Place, token: int) -> Place:
        return self._automaton.step(*place, token)

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        verified = [*context, *outcome.accepted.tokens]
        if verified[: len(self._text)] == self._text:
            self._append(verified)
        if len(self._asked) <= len(context) or self._asked != verified[: len(self._asked)]:
            self._asked = []

    def _append(self, text: Sequence[int]) -> None:
        for token in text[len(self._text) :]:
            self._automaton.append(token)
            self._text.append(token)


def _length_class(length: int) -> int:
    return next(least for least, _ in (*_PRIORS, (0, 0.0)) if length >= least)


def _prior(length: int) -> float:
    return next((prior for least, prior in _PRIORS if length >= least), 0.05)


def _share_class(share: float) -> int:
    return 2 if share > 0.9 else 1 if share > 0.4 else 0
