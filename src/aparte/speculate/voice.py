"""What can continue a chain: a source that costs nothing to ask, or a model that costs a pass per token."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aparte.speculate.common import Common, CommonTable
from aparte.speculate.context import Context
from aparte.speculate.drafter import Outcome, wanted_likely
from aparte.speculate.neural import Guess, TreeModel
from aparte.speculate.recycling import Recycling
from aparte.speculate.source import Candidate, Source
from aparte.speculate.tree import BELOW_ROOT

log = logging.getLogger(__name__)

#: Classes of a model's probability for its best token.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
#: A model that fails so many times in a row is left alone.
MAX_FAILURES = 3


class Voice(Protocol):
    """Follows one chain below one context, and names what may come next where it has got to."""

    @property
    def is_model(self) -> bool:
        """Whether its priors are a distribution, at temperature 1, and asking it costs a pass."""
        ...

    def begin(self, context: Sequence[int]) -> None:
        """Start below ``context``, whose last token is the pending one."""
        ...

    def candidates(self) -> list[Candidate]:
        """What may come next, best first; each token once."""
        ...

    def follow(self, token: int) -> None:
        """The chain goes on with ``token``."""
        ...

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        """Take in what became of a chain below ``context``."""
        ...


class SourceVoice:
    """A source of a merged tree, asked along one path."""

    is_model = False

    def __init__(self, source: Source) -> None:
        self._source = source
        self.likely = wanted_likely([source])
        self._place: Any = None

    def begin(self, context: Sequence[int]) -> None:
        self._place = self._source.start(context)

    def candidates(self) -> list[Candidate]:
        return self._source.candidates(self._place)

    def follow(self, token: int) -> None:
        self._place = self._source.advance(self._place, token)

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        self._source.learn(context, outcome)


def open_voice(name: str, models: Mapping[str, TreeModel | CommonTable]) -> Voice:
    """A new voice of that name; ``models`` holds what had to be loaded."""
    model = models.get(name)
    if model is None or isinstance(model, CommonTable):
        return SourceVoice(open_source(name, model))
    return ModelVoice(name, model)


def open_source(name: str, table: CommonTable | None = None) -> Source:
    """A new source of that name, with its ``table`` if it has one."""
    if table is not None:
        return Common(table)
    return Recycling() if name == "recycling" else Context()


def usable(guess: Guess) -> dict[int, float]:
    """What can be used of a guess: each token once, with a probability that is one."""
    found: dict[int, float] = {}
    for token, probability in zip(guess.tokens, guess.probabilities, strict=False):
        # A comparison with NaN is false.
        if type(token) is int and token >= 0 and token not in found and 0 < probability <= 1:
            found[token] = float(probability)
    return found


class ModelVoice:
    """A model, read on only when it is asked: while another voice speaks it waits, and catches up then.

    A model that errs, whether in what it returns or by raising, costs proposals and nothing else.
    """

    is_model = True

    def __init__(self, name: str, model: TreeModel) -> None:
        self._name = name
        self._model = model
        self._context: Sequence[int] = ()
        self._path: list[int] = []
        self._read = -1  # tokens of the path that the model has read; -1 before it read the context
        self._said: list[Candidate] | None = None
        self._failures = 0

    def begin(self, context: Sequence[int]) -> None:
        self._context, self._path, self._read, self._said = context, [], -1, None

    def candidates(self) -> list[Candidate]:
        if self._said is None:
            self._said = [] if self._failures >= MAX_FAILURES else self._ask()
        return self._said

    def follow(self, token: int) -> None:
        self._path.append(token)
        if self._said != []:  # a model that has nothing to say here has nothing to say below either
            self._said = None

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        """Its reading follows the next context by itself."""

    def _ask(self) -> list[Candidate]:
        try:
            guess = self._model.begin(self._context) if self._read < 0 else None
            self._read = max(self._read, 0)
            if guess is None and not self._path:
                return []
            while self._read < len(self._path):
                node = self._read
                (guess,) = self._model.extend([node - 1 if node else BELOW_ROOT], [self._path[node]])
                self._read += 1
        except Exception as error:  # whatever it is, the text does not depend on it
            self._failures += 1
            log.warning(
                "The %s drafter failed (%s)%s.",
                self._name,
                type(error).__name__,
                ", and is left alone from now on" if self._failures == MAX_FAILURES else "",
            )
            return []
        if self._path:  # where a model only begins, it has not shown that it works
            self._failures = 0
        if guess is None:
            return []
        found = usable(guess)
        if not found:
            return []
        kind = (self._name, "chain", bisect_right(EDGES, max(found.values())), min(len(self._path), 3))
        return [Candidate(token, kind, probability) for token, probability in found.items()]
