"""A model read along the branches of one tree: every place at most once, and those above it first."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from aparte.speculate.neural import TreeModel
from aparte.speculate.tree import BELOW_ROOT
from aparte.speculate.voice import MAX_FAILURES, usable

log = logging.getLogger(__name__)


class Reader:
    """Says what a model thinks may follow a node. Nodes are the caller's, in the order of the tree.

    A model that errs, whether in what it returns or by raising, costs proposals and nothing else.
    """

    def __init__(self, name: str, model: TreeModel) -> None:
        self.name = name
        self._model = model
        self._failures = 0
        self._context: Sequence[int] = ()
        self._numbers: dict[int, int] = {}  # the model's own, by node; those that were read
        self._said: dict[int, dict[int, float]] = {}
        self._count = 0
        self._blocked = False

    def begin(self, context: Sequence[int]) -> None:
        """A new tree, below ``context``."""
        self._context, self._numbers, self._said, self._count = context, {}, {}, 0
        self._blocked = self._failures >= MAX_FAILURES

    def said(self, node: int) -> Mapping[int, float]:
        """Tokens after ``node`` and their probabilities at temperature 1, the best ones; empty if unread."""
        return self._said.get(node, {})

    def read(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> int:
        """Read ``nodes`` of the tree of ``tokens`` and ``parents``; returns how many passes that took."""
        passes = 0
        try:
            if not self._blocked and BELOW_ROOT not in self._numbers:
                passes += 1
                guess = self._model.begin(self._context)
                self._blocked = guess is None
                self._numbers[BELOW_ROOT] = BELOW_ROOT
                self._said[BELOW_ROOT] = {} if guess is None else usable(guess)
            waiting = self._missing(nodes, parents)
            while waiting and not self._blocked:
                passes += 1
                batch = [node for node in waiting if parents[node] in self._numbers]
                guesses = self._model.extend(
                    [self._numbers[parents[node]] for node in batch], [tokens[node] for node in batch]
                )
                if len(guesses) != len(batch):
                    raise ValueError("the model returned guesses for another number of nodes")
                for node, guess in zip(batch, guesses, strict=True):
                    self._numbers[node], self._count = self._count, self._count + 1
                    self._said[node] = usable(guess)
                waiting = [node for node in waiting if node not in self._numbers]
                self._failures = 0  # where a model only begins, it has not shown that it works
        except Exception as error:  # whatever it is, the text does not depend on it
            self._failures += 1
            self._blocked = True
            log.warning(
                "The %s drafter failed (%s)%s.",
                self.name,
                type(error).__name__,
                ", and is left alone from now on" if self._failures == MAX_FAILURES else "",
            )
        return passes

    def _missing(self, nodes: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Those of ``nodes``, and of their ancestors, that were not read yet; ancestors first."""
        missing: set[int] = set()
        for node in nodes:
            place = node
            while place != BELOW_ROOT and place not in self._numbers and place not in missing:
                missing.add(place)
                place = parents[place]
        return sorted(missing)
