"""Lookahead decoding: n-grams collected on the way, verified in parallel (paper A, section 4.2).

Every round trip carries two kinds of nodes below the pending token: *candidates*, n-grams from a pool
that begin with the last tokens of the text, as branches; and the *window*, a chain of Jacobi guesses
whose only purpose is that the target's answers to it yield new n-grams. The longest candidate that the
target agrees with is kept.

:class:`Lookahead` is the drafter that stands for itself, as in the paper; :class:`LookaheadSource` offers
the same candidates and the same window to a tree merged from many sources.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from aparte.speculate.drafter import Outcome
from aparte.speculate.source import Candidate
from aparte.speculate.tree import BELOW_ROOT, DraftTree, TreeBuilder

#: Continuations remembered per key; the least recently seen goes first.
_PER_KEY = 8
#: Estimates for the order of nodes among drafters: a candidate from text, a candidate from a guess.
_CANDIDATE_DECAY = 0.6
_WINDOW_DECAY = 0.2
#: First guesses of the source, for the newest continuation: after a match of two or more tokens, of one,
#: and for a guess of the window.
_LONG_PRIOR, _SHORT_PRIOR, _WINDOW_PRIOR = 0.4, 0.2, 0.05


class NgramPool:
    """n-grams by the one or two tokens they begin with, most recently seen first."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._by_key: dict[tuple[int, ...], OrderedDict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._by_key.values())

    def add(self, gram: Sequence[int]) -> None:
        """Remember an n-gram: under its first token, and under its first two."""
        for size in (1, 2):
            key, rest = tuple(gram[:size]), tuple(gram[size:])
            if rest:
                entries = self._by_key.setdefault(key, OrderedDict())
                entries[rest] = None
                entries.move_to_end(rest)
                if len(entries) > _PER_KEY:
                    entries.popitem(last=False)

    def add_text(self, tokens: Sequence[int]) -> None:
        """Remember every n-gram of ``tokens``."""
        for start in range(len(tokens) - self.n + 1):
            self.add(tokens[start : start + self.n])

    def matches(self, context: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Continuations of ``context`` with the number of tokens that they go by: first those that match
        its last two tokens, then those that match its last one, the newest first."""
        for size in (2, 1):
            for rest in reversed(self._by_key.get(tuple(context[-size:]), ())):
                yield size, rest

    def candidates(self, context: Sequence[int]) -> Iterable[tuple[int, ...]]:
        """Continuations of ``context`` in the order of :meth:`matches`."""
        return (rest for _, rest in self.matches(context))


class Window:
    """Jacobi guesses for the next positions, and the n-grams that their iteration yields."""

    def __init__(self, pool: NgramPool) -> None:
        self._pool = pool
        # Jacobi iterates by absolute position, the newest last: their diagonals are the n-grams.
        self._history: list[dict[int, int]] = []
        self._guesses: dict[int, int] = {}

    def clear(self) -> None:
        """Forget the guesses: another text."""
        self._history, self._guesses = [], {}

    def guess(self, context: Sequence[int], size: int) -> list[int]:
        """Guesses for the ``size`` positions after ``context``, the first ones arbitrary tokens of it."""
        root = len(context) - 1
        self._guesses = {
            position: self._guesses.get(position, context[-1 - (position % len(context))])
            for position in range(root + 1, root + 1 + size)
        }
        return list(self._guesses.values())

    def learn(self, root: int, outcome: Outcome) -> None:
        """One Jacobi iteration: what the target says after each guess is the next guess one further on.

        ``root`` is the position of the token that was pending.
        """
        children = outcome.tree.children()
        answers, node = {root + 1: outcome.choices[0]}, BELOW_ROOT
        for position, guess in self._guesses.items():
            child = children.get((node, guess))
            if child is None:  # the end of the window was cut off by the budget or the context limit
                break
            answers[position + 1] = outcome.choices[1 + child]
            node = child
        self._history = [*self._history, self._guesses][-(self._pool.n - 1) :]
        self._collect(answers)
        tip = root + len(outcome.accepted.tokens)
        self._guesses = {position: token for position, token in answers.items() if position > tip}

    def _collect(self, answers: dict[int, int]) -> None:
        """Add the diagonals through the last iterates that end in an answer."""
        n = self._pool.n
        iterates = [*self._history, answers][-n:]
        for end in answers:
            gram = [iterate.get(end - (len(iterates) - 1 - age)) for age, iterate in enumerate(iterates)]
            if len(gram) == n and all(token is not None for token in gram):
                self._pool.add([token for token in gram if token is not None])


class Lookahead:
    """The drafter: an n-gram pool and a Jacobi window that feeds it."""

    runs_ahead = False  # the window is iterated from one outcome to the next

    def __init__(self, n: int, window: int | None = None) -> None:
        self._pool = NgramPool(n)
        self._window = Window(self._pool)
        self._window_size = window if window is not None else n
        self._seen = 0  # tokens of the context that are in the pool already
        self._root = 0  # position of the pending token of the last proposal

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        n = self._pool.n
        if len(context) < self._seen:  # another prompt, or a turn that was edited
            self._seen = 0
            self._window.clear()
        self._pool.add_text(context[max(0, self._seen - n + 1) :])
        self._seen = len(context)
        self._root = len(context) - 1

        window = min(self._window_size, budget // 3)
        tree = TreeBuilder()
        for candidate in self._pool.candidates(context):
            room = budget - window - len(tree)
            if room <= 0:
                break
            tree.add_chain(candidate, _CANDIDATE_DECAY, room)
        node, probability = BELOW_ROOT, 1.0
        for guess in self._window.guess(context, min(self._window_size, budget - len(tree))):
            probability *= _WINDOW_DECAY
            node = tree.add(node, guess, probability)
        return tree.build()

    def observe(self, outcome: Outcome) -> None:
        self._window.learn(self._root, outcome)


@dataclass(frozen=True)
class Place:
    """The last two tokens; n-grams under way, as (tokens matched, tokens left); how far in the window."""

    tokens: tuple[int, ...]
    under_way: tuple[tuple[int, tuple[int, ...]], ...] = ()
    in_window: int | None = None


class LookaheadSource:
    """The same pool and window as a source of a merged tree."""

    def __init__(self, n: int, window: int | None = None) -> None:
        self._pool = NgramPool(n)
        self._window = Window(self._pool)
        self._window_size = window if window is not None else n
        self._seen: list[int] = []  # the context as far as it is in the pool
        self._guesses: list[int] = []

    def start(self, context: Sequence[int]) -> Place:
        # A context may also be shorter than the last one, which ran ahead of what was verified.
        pairs = enumerate(zip(self._seen, context, strict=False))
        shared = next((i for i, (old, new) in pairs if old != new), min(len(self._seen), len(context)))
        self._pool.add_text(context[max(0, shared - self._pool.n + 1) :])
        self._seen = list(context)
        self._guesses = self._window.guess(context, self._window_size)
        return Place(tuple(context[-2:]), in_window=0)

    def candidates(self, place: Place) -> list[Candidate]:
        found: dict[int, Candidate] = {}
        for length, rest in self._matches(place):
            rank = len(found)
            prior = (_LONG_PRIOR if length > 1 else _SHORT_PRIOR) / (1 + rank)
            found.setdefault(rest[0], Candidate(rest[0], ("lookahead", length, min(rank, 3)), prior))
        if place.in_window is not None and place.in_window < len(self._guesses):
            guess = self._guesses[place.in_window]
            found.setdefault(guess, Candidate(guess, ("window", min(place.in_window, 2)), _WINDOW_PRIOR))
        return list(found.values())

    def advance(self, place: Place, token: int) -> Place:
        under_way = dict.fromkeys(
            (length + 1, rest[1:]) for length, rest in self._matches(place) if rest[0] == token and rest[1:]
        )
        depth = place.in_window
        if depth is not None:
            depth = depth + 1 if self._guesses[depth : depth + 1] == [token] else None
        return Place((place.tokens[-1], token), tuple(under_way), depth)

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        self._window.learn(len(context) - 1, outcome)

    def _matches(self, place: Place) -> Iterator[tuple[int, tuple[int, ...]]]:
        """What may come next, the longest match first."""
        yield from place.under_way
        yield from self._pool.matches(place.tokens)
