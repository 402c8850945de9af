"""The one decoding loop: propose, forward, accept, commit, emit.

Sequential decoding is this loop with nothing proposed; Jacobi and lookahead only differ in the drafter.
The loop knows targets and drafters by their protocols; it owns tokens, sampling and stopping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from aparte.config import Sampling
from aparte.distribution import Row
from aparte.errors import UserError
from aparte.pipeline import Flight, Pipeline
from aparte.prefill import Prefill
from aparte.recovery import CacheLostError, Recovery
from aparte.sampling import choose
from aparte.session import Session
from aparte.speculate.accept import accept
from aparte.speculate.ahead import SendAhead
from aparte.speculate.budget import Budget
from aparte.speculate.drafter import Drafter, Outcome
from aparte.target.base import Target, Timing

FinishReason = Literal["stop", "length"]
#: Told how many tokens of a prompt have been read, and of how many.
PrefillProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class StepRecord:
    """One round trip: what was sent, what came of it, where the time went.

    ``nodes`` counts every node of the step, ``drafted`` the speculative ones among them, ``accepted``
    the tokens committed (accepted drafts and the target's own). ``step_ms`` is wall time from proposal
    to commit; ``timing.rtt_ms`` is the network's share of it.

    A step that was sent ahead, before the result of the one before was there, is ``ahead``. Its times
    overlap with those of that one; ``step_ms`` then counts from that one's end. ``stale`` is the number of
    steps sent ahead that this one's result made worthless. ``reconnects`` is how often the connection was
    lost, and found again, before this one's result was there.
    """

    nodes: int
    drafted: int
    accepted: int
    step_ms: float
    draft_ms: float
    timing: Timing
    ahead: bool = False
    stale: int = 0
    reconnects: int = 0

    def to_json(self) -> dict[str, float | int]:
        """The record as in ``--json`` (design section 8). ``device_ms`` includes drafting."""
        timing = self.timing
        return {
            "nodes": self.nodes,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "ahead": self.ahead,
            "stale": self.stale,
            "reconnects": self.reconnects,
            "step_ms": round(self.step_ms, 3),
            "rtt_ms": round(timing.rtt_ms, 3),
            "device_ms": round(timing.device_ms + self.draft_ms, 3),
            "cloud_ms": round(timing.cloud_ms, 3),
            "queue_ms": round(timing.queue_ms, 3),
            "codec_ms": round(timing.codec_ms, 3),
            "bytes_up": timing.bytes_up,
            "bytes_down": timing.bytes_down,
        }


@dataclass(frozen=True)
class Committed:
    """What one round trip added to the answer. ``finish`` is set on the last one.

    ``reused`` is the number of prompt tokens that the target held already when the answer began.
    """

    tokens: tuple[int, ...]
    record: StepRecord
    finish: FinishReason | None
    reused: int


@dataclass(frozen=True)
class Job:
    """One answer to write: prompt, choice of tokens, and when to stop.

    ``in_flight`` is the most steps to have under way. ``ahead`` decides whether one more pays; without it
    they are sent whenever there is something to propose. ``clock`` gives the seconds that steps are timed by.
    ``recovery`` decides what a lost connection means; by default it is the end.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    eos: frozenset[int]
    max_nodes: int
    prefill_chunk: int = 128
    budget: Budget | None = None
    in_flight: int = 1
    ahead: SendAhead | None = None
    clock: Callable[[], float] = time.perf_counter
    recovery: Recovery = field(default_factory=Recovery)


def decode(
    target: Target, session: Session, drafter: Drafter, job: Job, on_prefill: PrefillProgress | None = None
) -> Generator[Committed, None, None]:
    """Write the answer, one round trip at a time.

    Raises :class:`UserError` before anything is sent if the prompt does not fit, and
    :class:`~aparte.errors.LinkError` if the cloud goes away for good; what was yielded until then is valid. A
    consumer may stop at any time: the session then holds what is committed, steps still under way are
    abandoned, and the next answer goes on from there. Any error (or interrupt) empties the session, because
    what the stages hold is unknown then.
    """
    with job.recovery.answer():
        if session.origin != _origin(target, len(job.prompt)):
            _restart(target, session, len(job.prompt))
        if not job.recovery.open(target):
            session.clear()
        limit = _limit(target, job)
        pipeline = Pipeline(target, session, drafter, job, longest=len(job.prompt) + limit)
        try:
            yield from _decode(target, session, drafter, job, pipeline, on_prefill)
        except GeneratorExit:  # the consumer stopped between two steps: everything is in order
            raise
        except BaseException:
            session.clear()
            target.reset()
            raise
        finally:
            pipeline.abandon()


def _limit(target: Target, job: Job) -> int:
    """Tokens the answer may have, given the context."""
    if not job.prompt:
        raise UserError("The prompt is empty: there is nothing to continue. Give at least one token.")
    room = target.max_context - len(job.prompt)
    if room < 1:
        raise UserError(
            f"The prompt has {len(job.prompt)} tokens and the model's context {target.max_context}. "
            "Shorten the prompt, or use a model with a longer context."
        )
    return min(job.max_new_tokens, room)


def _origin(target: Target, length: int) -> int:
    """Slot of the first token of a text of ``length`` tokens."""
    return target.rotary_switch if target.rotary_switch is not None and length > target.rotary_switch else 0


def _restart(target: Target, session: Session, length: int) -> None:
    """Forget what was computed of the text: its rotary embeddings become others at this length, or again."""
    if session.restart(_origin(target, length)):
        target.reset()


def _decode(
    target: Target,
    session: Session,
    drafter: Drafter,
    job: Job,
    pipeline: Pipeline,
    on_prefill: PrefillProgress | None,
) -> Generator[Committed, None, None]:
    context = list(job.prompt)  # everything known, the pending token last
    root = torch.empty(0)  # logits that the pending token was chosen from
    root_likely: tuple[Row, ...] = ()  # and the most probable tokens there, of a target that chooses itself
    reused = session.rewind_to(context)
    limit = pipeline.longest - len(context)
    written, lost, started = 0, job.recovery.lost, job.clock()
    prefill = Prefill(target, session, job, on_prefill)
    while True:
        if session.origin != _origin(target, len(context)):  # grown too long for what is computed of it
            pipeline.abandon()
            _restart(target, session, len(context))
            job.recovery.open(target)
            prefill = Prefill(target, session, job)
        # propose and forward
        try:
            if not pipeline:
                prefill.send(context)
                pipeline.send(context)
            if written and not prefill:  # a step that has chunks of a prompt ahead of it takes long enough
                pipeline.send_ahead()
            prefilled = prefill.finish()
            flight, evaluation = pipeline.collect()
        except CacheLostError:  # nothing that was committed is lost: it is sent again
            session.clear()
            pipeline.forget()
            prefill = Prefill(target, session, job, None if written else on_prefill)
            continue
        tree, logits, likely = flight.tree, evaluation.logits, evaluation.likely

        # accept
        choices = evaluation.choices
        if choices is None:
            positions = [len(flight.context) + depth for depth in (0, *tree.depths())]
            choices = tuple(choose(logits, positions[flight.known :], job.sampling))
        if flight.ahead:  # the token after its root came with the step before
            choices = (context[-1], *choices)
            logits = torch.cat([root, logits])
            likely = (*root_likely, *likely) if root_likely else ()
        accepted = accept(tree, choices)
        new = accepted.tokens[flight.known :]

        # commit
        session.commit(
            (*flight.pending_tokens, *accepted.tokens[:-1]),
            (*flight.pending_slots, *map(flight.slot, accepted.path)),
        )
        context.extend(new)
        job.recovery.reached(len(context))
        end = 1 + accepted.path[-1] if accepted.path else 0
        root, root_likely = logits[end : end + 1], likely[end : end + 1]
        observing = job.clock()
        timing = evaluation.timing
        drafter.observe(
            Outcome(
                tree,
                choices,
                accepted,
                logits,
                flight.context,
                flight.known,
                cloud_ms=timing.cloud_ms,
                likely=likely,
            )
        )
        ended = job.clock()
        stale = pipeline.settle(flight, accepted)
        tokens, finish = _stop(new, job.eos, limit - written)
        if finish:
            stale += pipeline.abandon()
        record = StepRecord(
            nodes=len(flight.step),
            drafted=len(tree),
            accepted=len(tokens),
            step_ms=(ended - started) * 1e3,
            draft_ms=flight.draft_ms + (ended - observing) * 1e3,
            timing=timing,
            ahead=flight.ahead,
            stale=stale,
            reconnects=job.recovery.lost - lost,
        )
        if prefilled is not None:
            record = replace(record, timing=_with_prefill(prefilled, record))
        if written and not record.reconnects and pipeline.is_plain(flight, timing):
            _learn_costs(job, flight, record)

        # emit
        written += len(tokens)
        yield Committed(tokens, record, finish, reused)
        if finish:
            return
        lost, started = job.recovery.lost, job.clock()


def _learn_costs(job: Job, flight: Flight, record: StepRecord) -> None:
    """Tell the budget and the plan what one round trip takes."""
    # Stale steps that were in its way say nothing about the link.
    waited_ms = record.timing.queue_ms if flight.behind_stale else 0.0
    if job.budget is not None:
        compute_ms = record.timing.device_ms + record.timing.cloud_ms
        job.budget.observe(
            record.nodes,
            record.step_ms - waited_ms,
            compute_ms,
            cloud_ms=record.timing.cloud_ms,
            tokens=record.accepted,
            hoped=1.0 + sum(flight.tree.probabilities),
        )
    if job.ahead is not None:
        job.ahead.observe(record.nodes, record.draft_ms, record.timing)


def _with_prefill(chunks: Timing, last: StepRecord) -> Timing:
    """The timing of a step whose prompt went ahead in chunks.

    The chunks' waits overlap, so their sum means nothing: the wait is what is left of the whole time.
    """
    timing = chunks + last.timing
    wait_ms = max(0.0, last.step_ms - last.draft_ms - timing.device_ms - timing.codec_ms)
    return replace(timing, wait_ms=wait_ms, queue_ms=last.timing.queue_ms)


def _stop(
    tokens: tuple[int, ...], eos: frozenset[int], left: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cut a block at the first end-of-sequence token or where the limit is reached."""
    for index, token in enumerate(tokens[:left]):
        if token in eos:
            return tokens[: index + 1], "stop"
    if len(tokens) >= left:
        return tokens[:left], "length"
    return tokens, None
