"""What a drafter is, and the registry of those that can be asked for by name.

Drafters guess; the target decides. Nothing a drafter does can change the text, only the number of
round trips it takes. A drafter's state belongs to one conversation and never leaves the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from aparte.distribution import Row
from aparte.errors import UserError
from aparte.speculate.accept import Accepted
from aparte.speculate.settings import Decoding
from aparte.speculate.tree import DraftTree

if TYPE_CHECKING:
    from aparte.speculate.common import CommonTable
    from aparte.speculate.neural import TreeModel
    from aparte.speculate.recycling import Recycling
    from aparte.speculate.source import Source


@dataclass(frozen=True)
class Outcome:
    """What became of a proposal.

    ``tree`` is the part of it that was sent; ``choices[0]`` is the target's token after the pending one,
    ``choices[1 + i]`` after node ``i``, for rejected nodes too; ``logits`` ``[1 + len(tree), V]`` likewise.
    They are ``[0, V]`` from a target that chooses tokens itself, which may leave rejected nodes without a
    choice (-1).
    ``context`` is what it was proposed for (empty: what was proposed for last). ``known`` is the number of
    accepted tokens that the outcome before told already: 1 if the proposal was sent ahead, else 0.
    ``likely`` has a row for each of the choices, or is empty: the most probable tokens there, from such a
    target that was asked for them.
    ``gained`` is for one source among many: how many accepted nodes there were only thanks to it.
    ``cloud_ms`` is what the cloud computed.
    """

    tree: DraftTree
    choices: tuple[int, ...]
    accepted: Accepted
    logits: torch.Tensor
    context: tuple[int, ...] = ()
    known: int = 0
    gained: int | None = None
    cloud_ms: float = 0.0
    likely: tuple[Row, ...] = ()


class Drafter(Protocol):
    """Two methods. ``context`` is everything up to and including the pending token.

    With pipelining it may run ahead: its last tokens are then guesses of an earlier proposal, whose outcome
    is still to come. There is an outcome for every proposal that proved right, in the order of proposals,
    and none for the others.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether it can propose again before the outcome of the last proposal is there."""
        ...

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        """At most ``budget`` nodes to hang below ``context[-1]``."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from what the target said about the last proposal."""
        ...


def wanted_likely(parts: Sequence[object]) -> int:
    """How many of the most probable tokens after each node drafters or sources learn from where there are no
    logits: the largest number that one of ``parts`` says as its ``likely``."""
    return max((int(getattr(part, "likely", 0)) for part in parts), default=0)


class Nothing:
    """Sequential decoding: an empty proposal every time."""

    runs_ahead = False

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:  # noqa: ARG002
        return DraftTree()

    def observe(self, outcome: Outcome) -> None:
        pass


def make_drafter(
    settings: Decoding,
    recycling: Recycling | None = None,
    models: Mapping[str, TreeModel | CommonTable] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    *,
    patient: bool = False,
) -> Drafter:
    """The drafter for ``--decode``; :class:`~aparte.speculate.settings.Decoding` has checked the name.

    ``recycling`` is a table to go on with, where the mode has one. ``models`` is what had to be loaded, by
    source. It outlives a drafter: a neural model begins anew with whatever context it is given. ``auto``
    takes up whatever there is. ``clock`` gives the seconds by which drafting has to be worth its time, unless
    it is ``patient``.
    """
    from aparte.speculate.context import Context
    from aparte.speculate.jacobi import Jacobi
    from aparte.speculate.lookahead import Lookahead, LookaheadSource
    from aparte.speculate.merge import Merged
    from aparte.speculate.recycling import Recycling as NewRecycling
    from aparte.speculate.recycling import RunnerUp

    match settings.decode:
        case "sequential":
            return Nothing()
        case "jacobi":
            return Jacobi(settings.jacobi_block)
        case "lookahead":
            return Lookahead(settings.ngram)
        case _:
            models = models or {}
            known: dict[str, Callable[[], Source]] = {
                **{
                    name: functools.partial(_source, name, model, clock, patient)
                    for name, model in models.items()
                },
                "context": Context,
                "lookahead": lambda: LookaheadSource(settings.ngram),
                "recycling": lambda: NewRecycling() if recycling is None else recycling,
                "runner-up": RunnerUp,
            }
            sources = settings.sources
            if settings.decode == "auto":
                sources = tuple(dict.fromkeys((*sources, *models)))
            if missing := [name for name in sources if name not in known]:
                raise UserError(f"This command cannot load what --decode {'+'.join(missing)} drafts with.")
            return Merged([known[name]() for name in sources])


def _source(name: str, model: TreeModel | CommonTable, clock: Callable[[], float], patient: bool) -> Source:
    from aparte.speculate.common import Common, CommonTable
    from aparte.speculate.neural import Neural

    if isinstance(model, CommonTable):
        return Common(model)
    return Neural(name, model, clock=clock, patient=patient)
