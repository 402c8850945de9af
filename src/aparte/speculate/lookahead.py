"""Lookahead decoding: n-grams collected on the way, verified in parallel (paper A, section 4.2).

Every round trip carries two kinds of nodes below the pending token: *candidates*, n-grams from a pool
that begin with the last tokens of the text, as branches; and the *window*, a chain of Jacobi guesses
whose only purpose is that the target's answers to it yield new n-grams. The longest candidate that the
target agrees with is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from aparte.speculate.drafter import Outcome
from aparte.speculate.tree import BELOW_ROOT, DraftTree, TreeBuilder

#: Continuations remembered per key; the least recently seen goes first.
_PER_KEY = 8
#: Estimates for the order of nodes among drafters: a candidate from text, a candidate from a guess.
_CANDIDATE_DECAY = 0.6
_WINDOW_DECAY = 0.2


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

    def candidates(self, context: Sequence[int]) -> Iterable[tuple[int, ...]]:
        """Continuations of ``context``: those that match its last two tokens first, then its last one."""
        for size in (2, 1):
            yield from reversed(self._by_key.get(tuple(context[-size:]), ()))


class Lookahead:
    """The drafter: an n-gram pool and a Jacobi window that feeds it."""

    def __init__(self, n: int, window: int | None = None) -> None:
        self._pool = NgramPool(n)
        self._window_size = window if window is not None else n
        self._seen = 0  # tokens of the context that are in the pool already
        self._root = 0  # position of the pending token of the last proposal
        # Jacobi iterates by absolute position, the newest last: their diagonals are the n-grams.
        self._history: list[dict[int, int]] = []
        self._window: dict[int, int] = {}

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        n = self._pool.n
        if len(context) < self._seen:  # another prompt, or a turn that was edited
            self._seen, self._window, self._history = 0, {}, []
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
        self._add_window(tree, context, min(self._window_size, budget - len(tree)))
        return tree.build()

    def _add_window(self, tree: TreeBuilder, context: Sequence[int], size: int) -> None:
        """Hang the Jacobi guesses for the next positions below the pending token."""
        node, probability, guesses = BELOW_ROOT, 1.0, {}
        for position in range(self._root + 1, self._root + 1 + size):
            guess = self._window.get(position, context[-1 - (position % len(context))])
            probability *= _WINDOW_DECAY
            node = tree.add(node, guess, probability)
            guesses[position] = guess
        self._window = guesses

    def observe(self, outcome: Outcome) -> None:
        # One Jacobi iteration: what the target says after each guess is the next guess one further on.
        children = outcome.tree.children()
        answers, node = {self._root + 1: outcome.choices[0]}, BELOW_ROOT
        for position, guess in self._window.items():
            child = children.get((node, guess))
            if child is None:  # the end of the window was cut off by the budget or the context limit
                break
            answers[position + 1] = outcome.choices[1 + child]
            node = child
        self._history = [*self._history, self._window][-(self._pool.n - 1) :]
        self._collect(answers)
        tip = self._root + len(outcome.accepted.tokens)
        self._window = {position: token for position, token in answers.items() if position > tip}

    def _collect(self, answers: dict[int, int]) -> None:
        """Add the diagonals through the last iterates that end in an answer."""
        n = self._pool.n
        iterates = [*self._history, answers][-n:]
        for end in answers:
            gram = [iterate.get(end - (len(iterates) - 1 - age)) for age, iterate in enumerate(iterates)]
            if len(gram) == n and all(token is not None for token in gram):
                self._pool.add([token for token in gram if token is not None])
