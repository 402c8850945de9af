"""Who shares a pass with whom, and who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from aparte.cloud.batch import Job, Outcome, Share, run_alone
from aparte.cloud.engine import Engine
from aparte.cloud.load import load_engine
from aparte.cloud.pass_cost import DEFAULT_NODES
from aparte.cloud.scheduler import Scheduler
from aparte.cloud.sessions import Computed, Session
from aparte.config import Cut
from aparte.errors import SlotError
from aparte.model.parts import Blueprint
from aparte.step import ROOT, Step, chain_parents
from running import FLOAT32

WIDTH = 32
PIECE = DEFAULT_NODES // 2


class Watched(Engine):
    """Notes who is in which pass; a pass can be held up."""

    def __init__(self, engine: Engine) -> None:
        self.__dict__ = {**engine.__dict__}
        self.log: list[dict[Session, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def run_pass(self, shares: Sequence[Share]) -> list[Outcome]:
        self.log.append({share.job.session: share.nodes for share in shares})
        assert self.gate.wait(10)
        if self.failure:
            raise self.failure
        return super().run_pass(shares)


@pytest.fixture(scope="module")
def plain(llama_folder: Path) -> Engine:
    return load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny")


@pytest.fixture
def engine(plain: Engine) -> Watched:
    return Watched(plain)


@pytest.fixture(autouse=True)
def _nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes of a tiny model cost would soon change how many nodes they have."""
    monkeypatch.setattr("aparte.cloud.pass_cost.PassCost.observe", lambda *_: None)


def job(session: Session, nodes: int = 1, tip: int = ROOT, *, epoch: int = 0) -> Job:
    step = Step(1, epoch, tip, tip + 1, chain_parents(tip, tip + 1, nodes))
    states = torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(tip + nodes))
    return Job(session, step, states.numpy().tobytes())


def play(scene: Callable[[Scheduler], Awaitable[None]], engine: Engine) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as worker:
            scheduler = Scheduler(engine, worker)
            await asyncio.wait_for(scene(scheduler), 20)
            await asyncio.sleep(0)
            assert scheduler.waiting == 0
            assert len(asyncio.all_tasks()) == 1, "nothing goes on when there is nothing to do"

    asyncio.run(run())


@asynccontextmanager
async def held_up(scheduler: Scheduler, engine: Watched) -> AsyncIterator[None]:
    """A first session's pass is under way for as long as the block lasts."""
    engine.gate.clear()
    first = asyncio.create_task(scheduler.compute(job(engine.open("float32"))))
    while not engine.log:
        await asyncio.sleep(0.001)
    yield
    await asyncio.sleep(0.01)
    engine.gate.set()
    assert isinstance(await first, Computed)


def test_what_waits_for_the_thread_shares_the_next_pass(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        sessions = [engine.open("float32") for _ in range(5)]
        async with held_up(scheduler, engine):
            steps = [asyncio.create_task(scheduler.compute(job(session, 3))) for session in sessions]
        answers = await asyncio.gather(*steps)
        expected = run_alone(engine.open("float32"), job(sessions[0], 3).step, job(sessions[0], 3)._payload)
        for answer in answers:
            assert answer is not None
            got, want = (
                torch.frombuffer(bytearray(x.payload), dtype=torch.float32) for x in (answer, expected)
            )
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert engine.log[1:] == [dict.fromkeys(sessions, 3)]
        assert (scheduler.passes, scheduler.shared_passes) == (2, 1)

    play(scene, engine)


def test_a_long_step_of_a_session_by_itself_is_not_cut(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        session = engine.open("float32")
        for tip in (-1, 299, 300, 301):
            await scheduler.compute(job(session, 300 if tip == -1 else 1, tip))
        assert engine.log == [{session: 300}, {session: 1}, {session: 1}, {session: 1}]

    play(scene, engine)


def test_a_long_step_in_company_is_cut_and_others_go_with_its_pieces(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        long, short = engine.open("float32"), engine.open("float32")
        order: list[str] = []

        async def ask(name: str, work: Job) -> None:
            assert isinstance(await scheduler.compute(work), Computed)
            order.append(name)

        async with held_up(scheduler, engine):
            tasks = [
                asyncio.create_task(ask("long", job(long, 4 * PIECE))),
                asyncio.create_task(ask("short", job(short, 2))),
            ]
        while "short" not in order:
            await asyncio.sleep(0)
        await ask("short again", job(short, 2, 1))
        await asyncio.gather(*tasks)
        assert order == ["short", "short again", "long"]
        assert engine.log[1] == {long: PIECE, short: 2}
        assert [nodes[long] for nodes in engine.log if long in nodes] == [PIECE] * 4

    play(scene, engine)


def test_a_prompt_is_cut_smaller_than_a_tree_of_drafts(
    engine: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aparte.cloud.pass_cost.PassCost.piece", 8)

    async def scene(scheduler: Scheduler) -> None:
        prompt, drafts = engine.open("float32"), engine.open("float32")
        tree = Job(drafts, Step(1, 0, ROOT, 0, (ROOT, *[0] * 15)), bytes(16 * 4 * WIDTH))
        assert (job(prompt, 20).chain, tree.chain) == (20, 2)
        async with held_up(scheduler, engine):
            work = [asyncio.create_task(scheduler.compute(one)) for one in (job(prompt, 20), tree)]
        await asyncio.gather(*work)
        assert engine.log[1:] == [{prompt: 8, drafts: 16}, {prompt: 8}, {prompt: 4}]

    play(scene, engine)


def test_no_pass_is_fuller_than_it_should_be_and_everybody_has_a_turn(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        sessions = [engine.open("float32") for _ in range(6)]
        async with held_up(scheduler, engine):
            work = [asyncio.create_task(scheduler.compute(job(one, 3 * PIECE))) for one in sessions]
        await asyncio.gather(*work)
        assert all(sum(shares.values()) <= DEFAULT_NODES for shares in engine.log)
        order = [session for shares in engine.log[1:] for session in shares]
        assert order == sessions * 3, "a round robin"

    play(scene, engine)


def test_a_small_step_overtakes_a_piece_that_does_not_fit_but_never_twice(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        sessions = [engine.open("float32") for _ in range(4)]
        sizes = [PIECE, PIECE - 2, 20, 2]
        async with held_up(scheduler, engine):
            work = [
                asyncio.create_task(scheduler.compute(job(one, size)))
                for one, size in zip(sessions, sizes, strict=True)
            ]
        await asyncio.gather(*work)
        one, two, three, four = sessions
        assert engine.log[1:] == [{one: PIECE, two: PIECE - 2, four: 2}, {three: 20}]

    play(scene, engine)


def test_a_step_that_became_stale_while_it_waited_is_not_computed(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        stale, gone, fine = (engine.open("float32") for _ in range(3))
        async with held_up(scheduler, engine):
            work = [asyncio.create_task(scheduler.compute(job(one, 2))) for one in (stale, gone, fine)]
            await asyncio.sleep(0)
            stale.epoch = 1
            gone.abandoned = True
        assert await work[0] is None
        assert await work[1] is None
        assert isinstance(await work[2], Computed)
        assert engine.log[1:] == [{fine: 2}]

    play(scene, engine)


def test_who_gives_up_while_waiting_is_not_computed(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        session = engine.open("float32")
        async with held_up(scheduler, engine):
            work = asyncio.create_task(scheduler.compute(job(session, 2)))
            await asyncio.sleep(0)
            work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert len(engine.log) == 1

    play(scene, engine)


def test_an_error_goes_to_the_one_who_made_it(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        good, bad = engine.open("float32"), engine.open("float32")
        async with held_up(scheduler, engine):
            work = [
                asyncio.create_task(scheduler.compute(job(bad, 1, 70))),
                asyncio.create_task(scheduler.compute(job(good, 2))),
            ]
        with pytest.raises(SlotError):
            await work[0]
        assert isinstance(await work[1], Computed)

    play(scene, engine)


def test_nobody_waits_for_ever_if_the_engine_itself_fails(engine: Watched) -> None:
    async def scene(scheduler: Scheduler) -> None:
        sessions = [engine.open("float32") for _ in range(2)]
        engine.failure = RuntimeError("broken")
        answers = await asyncio.gather(
            *(scheduler.compute(job(session)) for session in sessions), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [RuntimeError, RuntimeError]
        engine.failure = None
        assert isinstance(await scheduler.compute(job(sessions[0])), Computed)

    play(scene, engine)


def test_it_learns_from_every_pass_what_passes_cost(engine: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr("aparte.cloud.pass_cost.PassCost.observe", lambda _, *pass_: seen.append(pass_))

    async def scene(scheduler: Scheduler) -> None:
        sessions = [engine.open("float32") for _ in range(3)]
        async with held_up(scheduler, engine):
            work = [asyncio.create_task(scheduler.compute(job(one, 4))) for one in sessions]
        await asyncio.gather(*work)

    play(scene, engine)
    assert [nodes for nodes, _ in seen] == [1, 12]
    assert seen[0][1] >= 10, "it was held up for that many milliseconds"


@pytest.mark.parametrize(("active_s", "pieces"), [(60.0, [PIECE, PIECE]), (0.02, [2 * PIECE])])
def test_who_was_there_lately_may_come_back_and_long_steps_are_cut_for_that(
    engine: Watched, monkeypatch: pytest.MonkeyPatch, active_s: float, pieces: list[int]
) -> None:
    monkeypatch.setattr("aparte.cloud.scheduler.ACTIVE_S", active_s)

    async def scene(scheduler: Scheduler) -> None:
        one, other = engine.open("float32"), engine.open("float32")
        await scheduler.compute(job(one))
        await asyncio.sleep(0.1)
        await scheduler.compute(job(other, 2 * PIECE))
        assert engine.log[1:] == [{other: nodes} for nodes in pieces]

    play(scene, engine)
