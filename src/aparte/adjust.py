"""Logits that depend on the answer so far, and log-probabilities of what was written.

Penalties and grammars change a token's logits by the text before it. In a draft tree that text is the path to
the node, so every node is adjusted by its own. The choice there is then the one that decoding token by token
would make, and speculation stays exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aparte.config import Penalties
from aparte.sampling import penalize
from aparte.session import Session
from aparte.step import ROOT, Step
from aparte.target.base import Ask, Evaluation, Target


class Adjustment(Protocol):
    """A function of the answer so far and nothing else."""

    def __call__(self, written: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[V]`` after ``written``, the answer's tokens so far; the given ones stay as they are."""
        ...


@dataclass(frozen=True)
class Penalized:
    """Penalties and biases as an :class:`Adjustment`."""

    penalties: Penalties

    def __call__(self, written: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return penalize(logits, written, self.penalties)


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer: the natural logarithm of its probability, and the likeliest tokens there.

    They are the model's own, ``softmax(logits)``, before temperature, filters, penalties and grammar.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class _Collected:
    """The model's logits ``[rows, V]`` of the step collected last; row 0 is that of ``first_slot``."""

    first_slot: int
    logits: torch.Tensor


class AdjustedTarget:
    """Stands in front of a target that gives logits, for the answer that :meth:`begin` announces."""

    def __init__(self, target: Target, session: Session) -> None:
        """``session`` is that of the writer that uses this target."""
        self._target = target
        self._session = session
        self._adjustments: tuple[Adjustment, ...] = ()
        self._prompt_tokens = 0
        self._pending: dict[int, tuple[int, int]] = {}  # parent slot and token of what is above the tip
        self._steps: deque[tuple[Step, int]] = deque()
        self._collected: _Collected | None = None

    def begin(self, prompt_tokens: int, adjustments: Sequence[Adjustment] = ()) -> None:
        """The next answer's prompt has so many tokens; its logits are adjusted by these, in this order."""
        self._adjustments = tuple(adjustments)
        self._prompt_tokens = prompt_tokens
        self._pending.clear()
        self._steps.clear()
        self._collected = None

    def logprobs(self, start: int, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        """Of ``tokens``, which the last step committed from position ``start`` of the text on."""
        collected = self._collected
        if collected is None or not tokens:
            return ()
        # Each token was chosen from the logits of the one before it.
        slots = self._session.slots[start - 1 : start - 1 + len(tokens)]
        rows = collected.logits[[slot - collected.first_slot for slot in slots]].log_softmax(dim=-1)
        own = rows.gather(1, torch.tensor(list(tokens), device=rows.device)[:, None])[:, 0].tolist()
        best = rows.topk(min(top, rows.shape[-1]), dim=-1) if top else None
        tops: list[tuple[tuple[int, float], ...]] = [() for _ in tokens]
        if best is not None:
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
        return tuple(
            TokenLogprob(token, value, likeliest)
            for token, value, likeliest in zip(tokens, own, tops, strict=True)
        )

    # -- the target's part -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._target.name

    @property
    def max_context(self) -> int:
        return self._target.max_context

    @property
    def rotary_switch(self) -> int | None:
        return self._target.rotary_switch

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def max_nodes(self) -> int:
        return self._target.max_nodes

    @property
    def bytes_up(self) -> int:
        return self._target.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._target.bytes_down

    def open(self) -> bool:
        kept = self._target.open()
        if not kept:  # nothing is under way then, and everything is sent again
            self._steps.clear()
            self._pending.clear()
        return kept

    def submit(self, step: Step, tokens: Sequence[int], ask: Ask) -> None:
        tip = self._session.tip
        self._pending = {slot: node for slot, node in self._pending.items() if tip < slot < step.base}
        self._pending.update(zip(step.slots, zip(step.parents, tokens, strict=True), strict=True))
        self._steps.append((step, ask.logits_from))
        self._target.submit(step, tokens, ask)

    @torch.inference_mode()
    def collect(self) -> Evaluation:
        evaluation = self._target.collect()
        step, first = self._steps.popleft()
        logits = evaluation.logits
        self._collected = _Collected(step.base + first, logits)
        if not self._adjustments or not len(logits):
            return evaluation
        rows = [
            self._adjusted(self._written(slot), row)
            for slot, row in zip(step.slots[first:], logits, strict=True)
        ]
        return Evaluation(torch.stack(rows), evaluation.timing, evaluation.choices)

    def abandon(self) -> None:
        self._steps.clear()
        self._target.abandon()

    def reset(self) -> None:
        self._steps.clear()
        self._pending.clear()
        self._collected = None
        self._target.reset()

    def close(self) -> None:
        self._target.close()

    def _written(self, slot: int) -> list[int]:
        """The answer's tokens on the path to ``slot``, itself included."""
        tip, path = self._session.tip, []
        while slot not in (tip, ROOT):
            slot, token = self._pending[slot]
            path.append(token)
        return [*self._session.tokens, *reversed(path)][self._prompt_tokens :]

    def _adjusted(self, written: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        for adjustment in self._adjustments:
            logits = adjustment(written, logits)
        return logits
