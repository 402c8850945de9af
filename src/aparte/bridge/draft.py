"""Drafting with a bridge: front, bridge and back on the device, the middle left out.

The front's and the back's caches are those of the split target itself, whose rows for the committed text
come from the true middle. Drafted nodes take the slots above the tip, which the target's next step, whose
``base`` is right above the tip, forgets first. So nothing has to be undone, and nothing can leak into
what is verified.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aparte.bridge.file import Bridge
from aparte.model.parts import Blueprint, Head
from aparte.model.stage import Stage
from aparte.session import Session
from aparte.speculate.neural import Guess
from aparte.speculate.tree import BELOW_ROOT
from aparte.step import Step
from aparte.target.split import SplitTarget

#: Next tokens named per node.
NAMED = 8


class BridgeParts:
    """What a bridge adds to the device's front and back: its layer as a stage, and a smaller head."""

    def __init__(self, bridge: Bridge, blueprint: Blueprint) -> None:
        self.net = bridge.net
        self.draft_ids = bridge.draft_ids
        self.head: Head = blueprint.draft_head(bridge.draft_ids)
        self.stage: Stage = blueprint.wrap([bridge.net.layer], bridge.layer)

    @torch.inference_mode()
    def guess(self, final: torch.Tensor) -> list[Guess]:
        """Back outputs ``[n, D]`` -> the likely next tokens of each.

        Probabilities are those within the draft vocabulary: what is missing there shows in calibration.
        """
        best = self.head(final).softmax(dim=-1).topk(min(NAMED, len(self.draft_ids)), dim=-1)
        tokens = self.draft_ids[best.indices.cpu()].tolist()
        rows = zip(tokens, best.values.tolist(), strict=True)
        return [Guess(tuple(row), tuple(shares)) for row, shares in rows]


class BridgeDraft:
    """A :class:`~aparte.speculate.neural.TreeModel` for the conversation in ``session``."""

    def __init__(self, parts: BridgeParts, target: SplitTarget, session: Session) -> None:
        self._parts = parts
        self._target = target
        self._session = session
        self._states = target.keep_states()
        # The bridge's own rows: those of the committed text come from true states.
        self._rows = Session()
        self._cache = parts.stage.new_cache()
        # The tree of the last begin.
        self._tip = self._base = 0
        self._guessed = torch.zeros(0)

    def begin(self, context: Sequence[int]) -> Guess | None:
        session, target = self._session, self._target
        # The pending token is the only one whose state is not back yet, or this is no place to start:
        # a long prompt, or a context that runs ahead of steps under way (whose slots must be left alone).
        if target.in_flight or len(context) != len(session.tokens) + 1 or not session.tokens:
            return None
        self._tip, self._base = session.tip, session.tip + 1
        pending = Step(number=0, epoch=0, commit=self._tip, base=self._base, parents=(self._tip,))
        front = target.draft_front(pending, context[-1:])
        known = self._rows.rewind_to(context)
        slots = session.slots[known:]
        entering = torch.cat([self._states.front(slots), front])
        # Each position goes with the middle's output of the position before; the first has none.
        before = self._states.middle(session.slots[max(0, known - 1) :])
        if known == 0:
            before = torch.cat([torch.zeros_like(before[:1]), before])
        step = self._rows.chain(len(entering))
        guessed = self._run(step, entering, before)[-1:]
        self._rows.commit(context[known:], step.slots)
        self._guessed = guessed
        return self._parts.guess(target.draft_back(pending, guessed))[0]

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        drafted = len(self._guessed) - 1
        first = self._base + 1 + drafted
        step = Step(
            number=0,
            epoch=0,
            commit=self._tip,
            base=first,
            parents=tuple(self._base + 1 + parent for parent in parents),  # -1 is the pending token's slot
        )
        front = self._target.draft_front(step, tokens)
        before = self._guessed[[1 + parent for parent in parents]]
        tip = self._rows.tip
        own = Step(
            number=0,
            epoch=0,
            commit=tip,
            base=tip + 1 + drafted,
            parents=tuple(tip if parent == BELOW_ROOT else tip + 1 + parent for parent in parents),
        )
        guessed = self._run(own, front, before)
        self._guessed = torch.cat([self._guessed, guessed])
        return self._parts.guess(self._target.draft_back(step, guessed))

    @torch.inference_mode()
    def _run(self, step: Step, front: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The bridge over new rows: guesses of the middle's output ``[n, D]``."""
        net = self._parts.net
        hidden = self._parts.stage.forward(self._cache, step, net.enter(front, before))
        return net.exit(hidden)
