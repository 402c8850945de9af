"""Steps of many sessions in one pass: the same answers as alone, and nobody pays for another's mistake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aparte.cloud.batch import Job, Outcome, Share, run_alone, run_pass
from aparte.cloud.engine import Engine
from aparte.cloud.load import load_engine
from aparte.cloud.sessions import Computed, MiddleSession, Session
from aparte.config import Cut, ServerLimits
from aparte.errors import FrameError, SlotError, WireOverflowError
from aparte.model.cache import SlotCache
from aparte.model.parts import Blueprint
from aparte.model.stage import Item, Output, Stage
from aparte.step import ROOT, Step, chain_parents
from random_steps import Model, draw_step
from running import FLOAT32

WIDTH = 32


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    return load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny", ServerLimits())


def payload(nodes: int, seed: int) -> bytes:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(seed)).numpy().tobytes()


def links(tip: int, base: int, count: int) -> Step:
    return Step(1, 0, tip, base, chain_parents(tip, base, count))


def whole(session: Session, step: Step, content: bytes) -> Share:
    return Share(Job(session, step, content), len(step))


def states_of(outcome: Outcome) -> torch.Tensor:
    assert isinstance(outcome, Computed), outcome
    return torch.frombuffer(bytearray(outcome.payload), dtype=torch.float32)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_passes_with_random_pieces_answer_as_if_alone(engine: Engine, data: st.DataObject) -> None:
    models = [Model() for _ in range(3)]
    shared = [engine.open("float32") for _ in models]
    alone = [engine.open("float32") for _ in models]
    expected: dict[Job, torch.Tensor] = {}
    jobs: list[Job | None] = [None] * len(models)
    for number in range(data.draw(st.integers(3, 9), label="passes")):
        shares = []
        for index, model in enumerate(models):
            job = jobs[index]
            if job is None:
                step, _ = draw_step(data, model, number)
                content = payload(len(step), 10 * number + index)
                job = jobs[index] = Job(shared[index], step, content)
                expected[job] = states_of(run_alone(alone[index], step, content))
            if data.draw(st.booleans(), label="takes part"):
                shares.append(Share(job, data.draw(st.integers(1, job.rest), label="nodes")))
        for share, outcome in zip(shares, engine.run_pass(shares), strict=True):
            if share.job.rest:
                assert outcome is None
            else:
                torch.testing.assert_close(states_of(outcome), expected[share.job], atol=1e-4, rtol=1e-4)
                jobs[jobs.index(share.job)] = None


def test_everybody_is_told_the_time_of_the_pass_and_its_company(engine: Engine) -> None:
    outcomes = engine.run_pass(
        [whole(engine.open("float32"), links(ROOT, 0, 3), payload(3, i)) for i in range(4)]
    )
    times = {outcome.compute_ms for outcome in outcomes if isinstance(outcome, Computed)}
    assert len(times) == 1
    assert times.pop() > 0
    assert [outcome.company for outcome in outcomes if isinstance(outcome, Computed)] == [4] * 4


def test_the_times_of_pieces_add_up(engine: Engine) -> None:
    job = Job(engine.open("float32"), links(ROOT, 0, 9), payload(9, 0))
    other = whole(engine.open("float32"), links(ROOT, 0, 1), payload(1, 0))
    assert engine.run_pass([Share(job, 4), other])[0] is None
    first = job.compute_ms
    (outcome,) = engine.run_pass([Share(job, 5)])
    assert isinstance(outcome, Computed)
    assert outcome.compute_ms > first > 0
    assert outcome.company == 2


class Fragile(MiddleSession):
    """A session whose answer cannot be sent."""

    def finish(self, step: Step, hidden: torch.Tensor, tapped: torch.Tensor | None) -> memoryview:
        raise WireOverflowError("An activation is too large.")


def test_hostile_sessions_hurt_nobody_in_their_pass(engine: Engine) -> None:
    """A slot that is not there, numbers that are none, a wrong size, an overflow, a closed session."""
    good, lone = engine.open("float32"), engine.open("float32")
    closed = engine.open("float32")
    closed.close()
    for index, base in enumerate((0, 3, 6)):
        step, content = links(base - 1, base, 3), payload(3, index)
        fragile = Fragile(good.stage, "float32", WIDTH, engine.limits, engine.slab)
        outcomes = engine.run_pass(
            [
                whole(engine.open("float32"), links(77, 78, 1), payload(1, 1)),
                whole(engine.open("float32"), links(ROOT, 0, 1), b"\xff" * WIDTH * 4),
                whole(good, step, content),
                whole(engine.open("float32"), links(ROOT, 0, 2), payload(1, 1)),
                whole(fragile, links(ROOT, 0, 2), payload(2, 1)),
                whole(closed, links(ROOT, 0, 1), payload(1, 1)),
            ]
        )
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [SlotError, FrameError, Computed, FrameError, WireOverflowError, SlotError]
        torch.testing.assert_close(
            states_of(outcomes[2]), states_of(run_alone(lone, step, content)), atol=1e-5, rtol=1e-5
        )


class Breaking(Stage):
    """Layers that fail, in company or alone, for the session with the cache ``poisoned``."""

    poisoned: SlotCache

    def __init__(self, stage: Stage, poisoned: SlotCache) -> None:
        self.__dict__ = {**stage.__dict__, "poisoned": poisoned}

    def forward_many(self, items: Sequence[Item]) -> list[Output | Exception]:
        outputs = super().forward_many(items)
        if any(item.cache is self.poisoned for item in items):
            raise RuntimeError("out of memory")
        return outputs

    def forward(self, cache: SlotCache, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        if cache is self.poisoned:
            raise RuntimeError("out of memory")
        return super().forward(cache, step, hidden)


def test_when_a_pass_fails_everybody_but_the_cause_still_gets_an_answer(engine: Engine) -> None:
    sessions = [engine.open("float32") for _ in range(3)]
    lone = engine.open("float32")
    stage = Breaking(sessions[0].stage, sessions[1].cache)
    for base in (0, 4):
        step, content = links(base - 1, base, 4), payload(4, base)
        outcomes = run_pass(stage, [whole(session, step, content) for session in sessions])
        expected = states_of(run_alone(lone, step, content))
        assert isinstance(outcomes[1], RuntimeError)
        for index in (0, 2):
            torch.testing.assert_close(states_of(outcomes[index]), expected, atol=1e-5, rtol=1e-5)


def test_a_stage_that_cannot_share_computes_one_after_the_other(engine: Engine) -> None:
    sessions = [engine.open("float32") for _ in range(3)]
    stage = Breaking(sessions[0].stage, SlotCache(0, 1, 1))
    stage.shares_passes = False
    stage.forward_many = None  # type: ignore[assignment, method-assign]
    step, content = links(ROOT, 0, 4), payload(4, 0)
    outcomes = run_pass(stage, [whole(session, step, content) for session in sessions])
    expected = states_of(run_alone(engine.open("float32"), step, content))
    assert all(torch.equal(states_of(outcome), expected) for outcome in outcomes)


def test_a_step_by_itself_is_computed_exactly_as_ever(engine: Engine) -> None:
    stage, session = engine.open("float32").stage, engine.open("float32")
    cache = stage.new_cache()
    for base, count in ((0, 5), (5, 1), (6, 3)):
        step, content = links(base - 1, base, count), payload(count, base)
        hidden = torch.frombuffer(bytearray(content), dtype=torch.float32).view(count, WIDTH)
        expected = stage.forward(cache, step, hidden)
        assert torch.equal(states_of(run_alone(session, step, content)), expected.flatten())


def test_who_waits_for_nothing(engine: Engine) -> None:
    session = engine.open("float32")
    job = Job(session, Step(1, 3, ROOT, 0, (ROOT,)), payload(1, 0))
    assert not job.stale
    session.epoch = 4
    assert job.stale
    session.epoch = 3
    session.abandoned = True
    assert job.stale
