"""What a drafter is, and the registry of those that can be asked for by name.

Drafters guess; the target decides. Nothing a drafter does can change the text, only the number of
round trips it takes. A drafter's state belongs to one conversation and never leaves the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from aparte.config import Decoding
from aparte.speculate.accept import Accepted
from aparte.speculate.tree import DraftTree

if TYPE_CHECKING:
    from aparte.speculate.recycling import Recycling


@dataclass(frozen=True)
class Outcome:
    """What became of a proposal.

    ``tree`` is the part of it that was sent; ``choices[0]`` is the target's token after the pending one,
    ``choices[1 + i]`` after node ``i``, for rejected nodes too; ``logits`` ``[1 + len(tree), V]`` likewise.
    """

    tree: DraftTree
    choices: tuple[int, ...]
    accepted: Accepted
    logits: torch.Tensor


class Drafter(Protocol):
    """Two methods. ``context`` is everything up to and including the pending token."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        """At most ``budget`` nodes to hang below ``context[-1]``."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from what the target said about the last proposal."""
        ...


class Nothing:
    """Sequential decoding: an empty proposal every time."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:  # noqa: ARG002
        return DraftTree()

    def observe(self, outcome: Outcome) -> None:
        pass


def make_drafter(settings: Decoding, recycling: Recycling | None = None) -> Drafter:
    """The drafter for ``--decode``; :class:`~aparte.config.Decoding` has checked the name.

    ``recycling`` is a table to go on with, where the mode has one.
    """
    from aparte.speculate.context import Context
    from aparte.speculate.jacobi import Jacobi
    from aparte.speculate.lookahead import Lookahead
    from aparte.speculate.merge import Merged
    from aparte.speculate.recycling import Recycling as NewRecycling
    from aparte.speculate.recycling import RunnerUp
    from aparte.speculate.source import Source

    match settings.decode:
        case "sequential":
            return Nothing()
        case "jacobi":
            return Jacobi(settings.jacobi_block)
        case "lookahead":
            return Lookahead(settings.ngram)
        case _:
            known: dict[str, Callable[[], Source]] = {
                "context": Context,
                "recycling": lambda: NewRecycling() if recycling is None else recycling,
                "runner-up": RunnerUp,
            }
            return Merged([known[name]() for name in settings.sources])
