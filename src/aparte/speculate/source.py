"""Sources of candidates, from which trees are grown best first.

A source looks at one place of a tree (the context and the path below it) and names tokens that may come
next, each with a *kind*: what it goes by. How often candidates of a kind turn out right is learned while
running (:mod:`aparte.speculate.calibration`), so sources need no probabilities of their own, only a
first guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aparte.speculate.drafter import Outcome

#: A source's name and what the candidate goes by, such as the length of a match and a rank.
Kind = tuple[str | int, ...]


@dataclass(frozen=True)
class Candidate:
    """A token that may come next; ``prior`` is the guess until experience with ``kind`` is there."""

    token: int
    kind: Kind
    prior: float


class Source(Protocol):
    """``Any`` stands for whatever a source needs to know about a place in the tree."""

    def start(self, context: Sequence[int]) -> Any:
        """The place after ``context``, whose last token is the pending one."""
        ...

    def candidates(self, place: Any) -> list[Candidate]:
        """What may come next, best first."""
        ...

    def advance(self, place: Any, token: int) -> Any:
        """The place one token further."""
        ...

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        """Take in what the target said; ``context`` ends with the token that was pending."""
        ...
