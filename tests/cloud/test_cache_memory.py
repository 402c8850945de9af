"""Memory for caches: who gets it, who has to leave, and that all of it comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aparte.cloud.batch import Job, Share, run_alone, run_pass
from aparte.cloud.engine import Engine
from aparte.cloud.load import load_engine
from aparte.cloud.memory import CacheMemory, FullError, free_bytes
from aparte.cloud.refusals import code_of
from aparte.cloud.sessions import LimitError, Session
from aparte.config import Cut, ServerLimits
from aparte.errors import UserError
from aparte.model.parts import Blueprint
from aparte.model.slab import FIRST_ROWS, SlabFullError
from aparte.step import ROOT, Step, chain_parents
from running import FLOAT32

WIDTH = 32
#: The tiny middle has 2 layers, with keys and values of 2 heads of 8 numbers in float32.
ROW_BYTES = 2 * 2 * 2 * 8 * 4
FIRST_BYTES = FIRST_ROWS * ROW_BYTES


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    engine = load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny")
    engine.probe()
    return engine


def links(tip: int, count: int) -> Step:
    return Step(1, 0, tip, tip + 1, chain_parents(tip, tip + 1, count))


def job(session: Session, nodes: int, tip: int = ROOT) -> Job:
    return Job(session, links(tip, nodes), bytes(nodes * WIDTH * 4))


def memory_of(
    engine: Engine,
    budget: int | None,
    row_bytes: int = ROW_BYTES,
    *,
    session_budget: int | None = None,
    share_of: Callable[[str], int | None] = lambda name: None,
) -> CacheMemory:
    """As a server has it: sessions opened from now on get their memory there."""
    memory = CacheMemory(budget, row_bytes, session_budget=session_budget, share_of=share_of)
    engine.slab = memory.slab
    return memory


def filled(engine: Engine, memory: CacheMemory, *, used: float = 0.0) -> Session:
    """An idle session with the smallest cache there is, last used at the time ``used``."""
    session = engine.open("float32")
    memory.add(session)
    run_alone(session, links(ROOT, 1), bytes(WIDTH * 4))
    session.last_used = used
    return session


def test_probing_finds_what_a_node_takes(engine: Engine) -> None:
    assert engine.row_bytes == ROW_BYTES


@pytest.mark.parametrize(("first", "then"), [(1, 1), (1, 255), (1, 256), (200, 100), (256, 300), (512, 100)])
def test_the_growth_of_a_step_is_known_before_it_is_computed(engine: Engine, first: int, then: int) -> None:
    memory_of(engine, None)
    session = engine.open("float32")
    for step in (links(ROOT, first), links(first - 1, then), links(first - 1, then), links(ROOT, 1)):
        before = session.nbytes
        growth = session.growth(step, engine.row_bytes)
        run_alone(session, step, bytes(len(step) * WIDTH * 4))
        assert session.nbytes - before == growth
    assert session.row_bytes == ROW_BYTES


def test_the_idle_session_that_was_used_the_longest_time_ago_leaves_first(engine: Engine) -> None:
    memory = memory_of(engine, 3 * FIRST_BYTES)
    left: list[str] = []
    sessions = {name: filled(engine, memory, used=used) for name, used in (("b", 2), ("a", 1), ("c", 3))}
    for name, session in sessions.items():
        session.on_evict = lambda name=name: left.append(name)  # type: ignore[misc]
    newcomer = engine.open("float32")
    memory.add(newcomer)
    assert left == ["a"]
    assert sessions["a"].closed
    memory.settle()
    memory.promise(job(newcomer, 300), 300)  # takes twice the first size
    assert left == ["a", "b"]
    assert memory.evicted == 2
    assert memory.held == FIRST_BYTES


def test_busy_sessions_stay_and_the_newcomer_is_refused(engine: Engine) -> None:
    memory = memory_of(engine, 2 * FIRST_BYTES)
    busy = [filled(engine, memory) for _ in range(2)]
    for session in busy:
        session.unanswered = 1
    with pytest.raises(FullError, match="Try again in 5 s"):
        memory.add(engine.open("float32"))
    assert not any(session.closed for session in busy)


def test_nobody_is_sent_away_for_a_step_that_would_not_fit_anyway(engine: Engine) -> None:
    memory = memory_of(engine, 3 * FIRST_BYTES)
    idle, greedy = filled(engine, memory), filled(engine, memory)
    greedy.unanswered = 1
    memory.settle()
    with pytest.raises(FullError):
        memory.promise(job(greedy, 512, 0), 512)
    assert not idle.closed


def test_what_several_steps_of_a_pass_will_take_counts_together(engine: Engine) -> None:
    memory = memory_of(engine, 3 * FIRST_BYTES)
    sessions = [engine.open("float32") for _ in range(4)]
    for session in sessions:
        memory.add(session)
        session.unanswered = 1
    memory.settle()
    for session in sessions[:3]:
        memory.promise(job(session, 1), 1)
    with pytest.raises(FullError):
        memory.promise(job(sessions[3], 1), 1)
    memory.settle()
    memory.promise(job(sessions[3], 1), 1)


def test_a_session_may_not_become_larger_than_any_may_be(engine: Engine) -> None:
    memory = memory_of(engine, None, session_budget=FIRST_BYTES)
    one, other = filled(engine, memory), filled(engine, memory)
    memory.promise(job(one, FIRST_ROWS - 1, 0), FIRST_ROWS - 1)
    with pytest.raises(LimitError, match="Begin a shorter conversation"):
        memory.promise(job(one, FIRST_ROWS, 0), FIRST_ROWS)
    assert not other.closed
    with pytest.raises(LimitError):
        memory_of(engine, None, session_budget=FIRST_BYTES - 1).add(engine.open("float32"))


def test_within_a_share_only_its_own_sessions_have_to_leave(engine: Engine) -> None:
    shares = {"alice": 2 * FIRST_BYTES, "bob": None}
    memory = memory_of(engine, 100 * FIRST_BYTES, share_of=shares.__getitem__)
    sessions = []
    for holder, used in (("bob", 0), ("alice", 2), ("alice", 1)):
        sessions.append(filled(engine, memory, used=used))
        sessions[-1].holder = holder
    newcomer = engine.open("float32")
    newcomer.holder = "alice"
    memory.add(newcomer)
    assert [session.closed for session in sessions] == [False, False, True]
    sessions[1].unanswered = 1
    memory.promise(job(newcomer, 1), 1)
    another = engine.open("float32")
    another.holder = "alice"
    with pytest.raises(FullError, match="This token's share"):
        memory.add(another)
    another.holder = "bob"
    memory.add(another)


def test_what_was_given_back_lies_idle_and_counts(engine: Engine) -> None:
    memory = memory_of(engine, 2 * FIRST_BYTES)
    for _ in range(5):
        session = filled(engine, memory)
        session.close()
        memory.remove(session)
        assert (memory.held, memory.slab.idle, memory.slab.peak) == (0, FIRST_BYTES, FIRST_BYTES)
    large = engine.open("float32")
    memory.add(large)
    memory.promise(job(large, 500), 500)  # takes all there is, and the idle buffers have to go
    run_alone(large, links(ROOT, 500), bytes(500 * WIDTH * 4))
    assert (memory.held, memory.slab.idle) == (2 * FIRST_BYTES, 0)


def test_room_is_made_for_the_buffer_that_is_there_twice(engine: Engine) -> None:
    """A cache that grows has old and new of one buffer for a moment."""
    for budget, fits in ((2 * FIRST_BYTES + FIRST_BYTES // 4, True), (2 * FIRST_BYTES + 1, False)):
        memory = memory_of(engine, budget)
        session = filled(engine, memory)
        growing = job(session, 300, 0)
        if not fits:
            with pytest.raises(FullError):
                memory.promise(growing, 300)
            continue
        memory.promise(growing, 300)
        run_pass(session.stage, [Share(growing, 300)])
        assert memory.slab.peak == budget


def test_a_long_step_gets_room_for_all_of_it_at_once(engine: Engine) -> None:
    memory = memory_of(engine, 2 * FIRST_BYTES)
    session = engine.open("float32")
    memory.add(session)
    long = job(session, 500)
    for _ in range(5):
        memory.promise(long, 100)
        run_pass(session.stage, [Share(long, 100)])
        memory.settle()
        assert memory.held == memory.slab.peak == memory.budget
    session.close()
    short = filled(engine, memory)
    memory.promise(job(short, 100, 0), 100)
    with pytest.raises(FullError):  # before a fifth of it is computed for nothing
        memory.promise(job(short, 500, 0), 100)


def test_a_session_whose_pass_is_under_way_is_not_sent_away(engine: Engine) -> None:
    """Its device was lost, so that nobody waits for it; but its memory is in use."""
    memory = memory_of(engine, FIRST_BYTES)
    parked = filled(engine, memory)
    parked.cache.begin(links(0, 1))
    with pytest.raises(FullError):
        memory.add(engine.open("float32"))
    parked.cache.end()
    memory.add(engine.open("float32"))
    assert parked.closed


def test_nothing_is_allocated_beyond_the_budget_even_if_nobody_knows_what_a_node_takes(
    engine: Engine,
) -> None:
    memory = memory_of(engine, FIRST_BYTES - 1, 0)
    session = engine.open("float32")
    memory.add(session)
    memory.promise(job(session, 1), 1)
    with pytest.raises(SlabFullError):
        run_alone(session, links(ROOT, 1), bytes(WIDTH * 4))
    assert code_of(SlabFullError(1, 1)) == "busy"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_comes_and_goes_stays_within_the_budget(engine: Engine, data: st.DataObject) -> None:
    quarters = data.draw(st.integers(4, 40), label="budget, in quarters of the smallest cache")
    memory = memory_of(engine, quarters * FIRST_BYTES // 4)
    sessions: list[Session] = []
    tips: dict[Session, int] = {}
    for _ in range(data.draw(st.integers(5, 25), label="events")):
        sessions = [session for session in sessions if not session.closed]
        event = data.draw(st.sampled_from(["open", "step", "step", "step", "close", "trim"]), label="event")
        if event == "open":
            session = engine.open("float32")
            with contextlib.suppress(FullError):
                memory.add(session)
                sessions.append(session)
                tips[session] = ROOT
        elif event == "trim":
            memory.slab.trim()
        elif sessions:
            session = data.draw(st.sampled_from(sessions), label="whose")
            if event == "close":
                session.close()
                memory.remove(session)
            else:
                grow(memory, session, tips, data.draw(st.sampled_from([1, 60, 300, 500]), label="nodes"))
        slab = memory.slab
        assert slab.used == sum(session.nbytes for session in sessions)
        assert slab.used + slab.idle <= slab.peak <= quarters * FIRST_BYTES // 4
    for session in sessions:
        session.close()
    assert memory.held == 0
    idle = memory.slab.idle
    assert memory.slab.trim() == idle
    assert memory.slab.idle == 0


def grow(memory: CacheMemory, session: Session, tips: dict[Session, int], nodes: int) -> None:
    """One step in two passes, as the scheduler does it; nothing if there is no room for it."""
    session.unanswered = 1
    step = job(session, nodes, tips[session])
    for part in filter(None, (nodes // 2, nodes - nodes // 2)):
        memory.settle()
        try:
            memory.promise(step, part)
        except FullError:
            busy = sum(other.nbytes for other in tips if other.unanswered and not other.closed)
            growth = session.growth(step.part(part), ROW_BYTES, step.rest - part)
            assert busy + growth + session.largest_buffer > (memory.budget or 0), "there was room"
            break
        (outcome,) = run_pass(session.stage, [Share(step, part)])
        assert not isinstance(outcome, Exception)
    else:
        tips[session] += nodes
    memory.settle()
    session.unanswered = 0


def test_a_session_that_has_ended_takes_nothing(engine: Engine) -> None:
    memory = memory_of(engine, None, 0)
    session = filled(engine, memory)
    assert memory.held == FIRST_BYTES
    assert memory.row_bytes == ROW_BYTES, "seen in the session's cache"
    session.close()
    memory.remove(session)
    assert memory.held == 0


def test_without_a_budget_nobody_has_to_leave(engine: Engine) -> None:
    memory = memory_of(engine, None)
    sessions = [filled(engine, memory) for _ in range(5)]
    memory.promise(job(sessions[0], 512, 0), 512)
    assert not any(session.closed for session in sessions)


def test_by_default_caches_may_take_half_of_what_is_free() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert 10**6 < free < 10**13


@pytest.mark.parametrize(
    ("text", "size"),
    [("auto", None), ("2GB", 2 * 10**9), ("1.5 gb", 15 * 10**8), ("300MB", 3 * 10**8), ("64000", 64000)],
)
def test_amounts_of_memory(text: str, size: int | None) -> None:
    assert ServerLimits.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1TB", "nan", "1e9", "2GB2"])
def test_what_is_not_an_amount_of_memory(text: str) -> None:
    with pytest.raises(UserError, match="not an amount of memory"):
        ServerLimits.parse_bytes(text)


def test_no_memory_at_all_is_not_enough() -> None:
    with pytest.raises(UserError, match="positive number"):
        ServerLimits(kv_bytes=0)
