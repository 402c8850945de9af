"""Memory for caches: who gets it, who has to leave, and that all of it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aparte.cloud.batch import Job, run_alone
from aparte.cloud.engine import Engine
from aparte.cloud.load import load_engine
from aparte.cloud.memory import CacheMemory, FullError, free_bytes
from aparte.cloud.sessions import LimitError, Session
from aparte.config import Cut, ServerLimits
from aparte.errors import UserError
from aparte.model.cache import INITIAL_ROWS
from aparte.model.parts import Blueprint
from aparte.step import ROOT, Step, chain_parents
from running import FLOAT32

WIDTH = 32
#: The tiny middle has 2 layers, with keys and values of 2 heads of 8 numbers in float32.
ROW_BYTES = 2 * 2 * 2 * 8 * 4
FIRST_BYTES = INITIAL_ROWS * ROW_BYTES


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    engine = load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny")
    engine.probe()
    return engine


def links(tip: int, count: int) -> Step:
    return Step(1, 0, tip, tip + 1, chain_parents(tip, tip + 1, count))


def job(session: Session, nodes: int, tip: int = ROOT) -> Job:
    return Job(session, links(tip, nodes), bytes(nodes * WIDTH * 4))


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
    session = engine.open("float32")
    for step in (links(ROOT, first), links(first - 1, then), links(first - 1, then), links(ROOT, 1)):
        before = session.nbytes
        growth = session.growth(step, engine.row_bytes)
        run_alone(session, step, bytes(len(step) * WIDTH * 4))
        assert session.nbytes - before == growth
    assert session.row_bytes == ROW_BYTES


def test_the_idle_session_that_was_used_the_longest_time_ago_leaves_first(engine: Engine) -> None:
    memory = CacheMemory(3 * FIRST_BYTES, ROW_BYTES)
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
    memory = CacheMemory(2 * FIRST_BYTES, ROW_BYTES)
    busy = [filled(engine, memory) for _ in range(2)]
    for session in busy:
        session.unanswered = 1
    with pytest.raises(FullError, match="Try again in 5 s"):
        memory.add(engine.open("float32"))
    assert not any(session.closed for session in busy)


def test_nobody_is_sent_away_for_a_step_that_would_not_fit_anyway(engine: Engine) -> None:
    memory = CacheMemory(3 * FIRST_BYTES, ROW_BYTES)
    idle, greedy = filled(engine, memory), filled(engine, memory)
    greedy.unanswered = 1
    memory.settle()
    with pytest.raises(FullError):
        memory.promise(job(greedy, 512, 0), 512)
    assert not idle.closed


def test_what_several_steps_of_a_pass_will_take_counts_together(engine: Engine) -> None:
    memory = CacheMemory(3 * FIRST_BYTES, ROW_BYTES)
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
    memory = CacheMemory(None, ROW_BYTES, session_budget=FIRST_BYTES)
    one, other = filled(engine, memory), filled(engine, memory)
    memory.promise(job(one, INITIAL_ROWS - 1, 0), INITIAL_ROWS - 1)
    with pytest.raises(LimitError, match="Begin a shorter conversation"):
        memory.promise(job(one, INITIAL_ROWS, 0), INITIAL_ROWS)
    assert not other.closed
    with pytest.raises(LimitError):
        CacheMemory(None, ROW_BYTES, session_budget=FIRST_BYTES - 1).add(engine.open("float32"))


def test_within_a_share_only_its_own_sessions_have_to_leave(engine: Engine) -> None:
    shares = {"alice": 2 * FIRST_BYTES, "bob": None}
    memory = CacheMemory(100 * FIRST_BYTES, ROW_BYTES, share_of=shares.__getitem__)
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


def test_a_session_that_has_ended_takes_nothing(engine: Engine) -> None:
    memory = CacheMemory(None)
    session = filled(engine, memory)
    assert memory.held == FIRST_BYTES
    assert memory.row_bytes == ROW_BYTES, "seen in the session's cache"
    session.close()
    memory.remove(session)
    assert memory.held == 0


def test_without_a_budget_nobody_has_to_leave(engine: Engine) -> None:
    memory = CacheMemory(None, ROW_BYTES)
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
