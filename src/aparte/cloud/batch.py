"""One forward pass for the steps of several sessions.

A :class:`Job` is a step on its way through the stage: in one pass, or in several pieces if it is long and
others wait. A piece of a step is a step itself, with the same commit and the next slots. Whatever goes wrong
with one job is that job's result and touches no other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aparte.cloud.sessions import Computed, Session
from aparte.model.stage import Item, Output, Stage
from aparte.step import Step


class Job:
    """One step of one session, and how far it has come."""

    def __init__(self, session: Session, step: Step, payload: bytes | memoryview) -> None:
        self.session = session
        self.step = step
        self._payload = payload
        self._hidden: torch.Tensor | None = None  # [n, D], there from the first pass on
        self._outputs: list[Output] = []
        self._done = 0
        #: Nodes that the step begins with as one chain: long for a piece of a prompt, short for drafts.
        self.chain = _leading_chain(step)
        #: Time of its passes so far, and the most sessions that shared one.
        self.compute_ms = 0.0
        self.company = 1

    @property
    def rest(self) -> int:
        """Nodes that have not been through the stage yet."""
        return len(self.step) - self._done

    @property
    def stale(self) -> bool:
        """True if nobody waits for the answer any more."""
        return self.session.abandoned or self.step.epoch < self.session.epoch

    def part(self, nodes: int) -> Step:
        """The next ``nodes`` nodes, as a step of their own."""
        step, end = self.step, self._done + nodes
        if nodes == len(step):
            return step
        return Step(
            step.number, step.epoch, step.commit, step.base + self._done, step.parents[self._done : end]
        )

    def piece(self, nodes: int) -> Item:
        """That part with its hidden states and the session's cache. Raises what is wrong with the step."""
        if self._hidden is None:
            self._hidden = self.session.begin(self.step, self._payload)
            self.session.cache.expect(len(self.step))
        step = self.part(nodes)
        hidden = self._hidden[self._done : self._done + nodes]
        return Item(self.session.cache, step, hidden, self.session.tap)

    def advance(self, nodes: int, output: Output) -> None:
        """Note the output of the piece."""
        self._outputs.append(output)
        self._done += nodes

    def charge(self, pass_ms: float, company: int) -> None:
        """Note the time of a pass that this job shared with ``company - 1`` others."""
        self.compute_ms += pass_ms
        self.company = max(self.company, company)

    def answer(self) -> memoryview:
        """The payload, once no node is left. Raises overflow errors."""
        hidden = _joined([output.hidden for output in self._outputs])
        tapped = [output.tapped for output in self._outputs if output.tapped is not None]
        return self.session.finish(self.step, hidden, _joined(tapped) if tapped else None)

    def computed(self, payload: memoryview) -> Computed:
        return Computed(payload, self.compute_ms, self.company)


@dataclass(frozen=True)
class Share:
    """What a job gets of a pass: its next ``nodes`` nodes."""

    job: Job
    nodes: int


#: What became of a job in a pass: its answer, its error, or None while there is more to do.
Outcome = Computed | Exception | None


def run_pass(stage: Stage, shares: Sequence[Share]) -> list[Outcome]:
    """One forward pass over ``shares``, which belong to different sessions."""
    started = time.perf_counter()
    outcomes: list[memoryview | Exception | None] = [None] * len(shares)
    items: dict[int, Item] = {}
    for index, share in enumerate(shares):
        try:
            items[index] = share.job.piece(share.nodes)
        except Exception as error:
            outcomes[index] = error
    for index, output in zip(items, _forward(stage, list(items.values())), strict=True):
        share = shares[index]
        if isinstance(output, Exception):
            outcomes[index] = output
            continue
        share.job.advance(share.nodes, output)
        try:
            outcomes[index] = None if share.job.rest else share.job.answer()
        except Exception as error:
            outcomes[index] = error
    pass_ms = (time.perf_counter() - started) * 1e3
    for share in shares:
        share.job.charge(pass_ms, len(shares))
    return [
        share.job.computed(outcome) if isinstance(outcome, memoryview) else outcome
        for share, outcome in zip(shares, outcomes, strict=True)
    ]


def run_alone(session: Session, step: Step, payload: bytes | memoryview) -> Computed:
    """All of one step by itself. Raises frame, slot, limit and overflow errors."""
    (outcome,) = run_pass(session.stage, [Share(Job(session, step, payload), len(step))])
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome is not None, "the whole step was in the pass"
    return outcome


def _forward(stage: Stage, items: list[Item]) -> list[Output | Exception]:
    """All at once where that is possible; if that fails for whatever reason, one by one."""
    if len(items) > 1 and stage.shares_passes:
        try:
            return stage.forward_many(items)
        except Exception:
            # A step may be repeated. Whose fault it was shows when each computes by itself.
            pass
    return [_forward_one(stage, item) for item in items]


def _forward_one(stage: Stage, item: Item) -> Output | Exception:
    try:
        if item.tap is None:
            return Output(stage.forward(item.cache, item.step, item.hidden))
        return stage.forward_one(item)
    except Exception as error:
        return error


def _leading_chain(step: Step) -> int:
    tip = step.commit
    for offset, parent in enumerate(step.parents):
        if parent != tip:
            return offset
        tip = step.base + offset
    return len(step)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
