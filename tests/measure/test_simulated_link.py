"""A link by arithmetic: round trips, bytes and both sides' compute, with one step under way or several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.verifier import load_verifier
from aparte.config import Sampling
from aparte.decode import Committed, Job, decode
from aparte.measure.simulated_link import SimulatedLink
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing
from aparte.step import Step
from aparte.target.draft import DraftTarget
from aparte.wire.frames import Frame, ResultFrame, StepFrame
from aparte.wire.frames import decode as decode_frame
from aparte.wire.frames import encode as encode_frame
from dialogue import PROMPT
from drafters import Adversary, Oracle
from running import FLOAT32

COUNT = 40


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Computing:
    """A link to a side that takes ``compute_ms`` for a step, and drops those of earlier epochs."""

    where, max_nodes, max_context = "Here", 64, 512

    def __init__(self, clock: Clock, compute_ms: float) -> None:
        self._clock, self._compute_ms = clock, compute_ms
        self._steps: deque[Step] = deque()

    def open(self) -> bool:
        return True

    def send(self, message: bytes) -> None:
        frame = decode_frame(message)
        assert isinstance(frame, StepFrame)
        self._steps.append(frame.step)

    def receive(self) -> tuple[Frame, int]:
        newest = self._steps[-1].epoch
        step = next(step for step in self._steps if step.epoch == newest)
        while self._steps.popleft() is not step:
            pass
        self._clock.now += self._compute_ms / 1e3
        return ResultFrame(step.number, self._compute_ms, 0.0, b""), 1000

    def close(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


def message(number: int, epoch: int = 0) -> bytes:
    return encode_frame(StepFrame(Step(number, epoch, number - 1, number, (number - 1,)), bytes(940)))


SIZE = len(message(1))


class TestTimes:
    @pytest.fixture
    def link(self, clock: Clock) -> SimulatedLink:
        link = SimulatedLink(Computing(clock, compute_ms=10), clock)
        link.profile = WanProfile(rtt_ms=80, mbps=1)
        return link

    def ms_of(self, link: SimulatedLink, action: Callable[[], object]) -> float:
        before = link.clock()
        action()
        return (link.clock() - before) * 1e3

    def test_one_step(self, link: SimulatedLink) -> None:
        def step() -> None:
            link.send(message(1))
            link.receive()

        assert self.ms_of(link, step) == pytest.approx(80 + 10 + (SIZE + 1000) * 8 / 1e3)

    def test_what_the_device_does_meanwhile_takes_no_time_of_its_own(
        self, link: SimulatedLink, clock: Clock
    ) -> None:
        def step(busy_s: float) -> None:
            link.send(message(1))
            clock.now += busy_s
            link.receive()

        alone = self.ms_of(link, lambda: step(0))
        assert self.ms_of(link, lambda: step(0.05)) == pytest.approx(alone)
        assert self.ms_of(link, lambda: step(0.5)) == pytest.approx(500)

    def test_a_step_behind_another_waits_for_the_line_and_the_other_side(self, link: SimulatedLink) -> None:
        link.profile = WanProfile(rtt_ms=80)
        link.send(message(1))
        link.send(message(2))
        assert self.ms_of(link, link.receive) == pytest.approx(90)
        found: list[Frame] = []
        assert self.ms_of(link, lambda: found.append(link.receive()[0])) == pytest.approx(10)
        (frame,) = found
        assert isinstance(frame, ResultFrame)
        assert frame.number == 2
        assert frame.queue_ms == pytest.approx(10)
        link.profile = WanProfile(rtt_ms=80, mbps=0.1)  # now the line is what takes time
        link.send(message(3))
        link.send(message(4))
        link.receive()
        assert self.ms_of(link, link.receive) == pytest.approx(max(SIZE, 1000) * 8 / 100)

    def test_stale_steps_count_if_the_other_side_had_begun(self, link: SimulatedLink) -> None:
        link.profile = WanProfile(rtt_ms=80)
        link.send(message(1))
        link.send(message(2))
        link.receive()  # at 90 ms; step 2 is computed from 50 to 60 ms, long before it can be told
        link.send(message(3, epoch=1))
        assert link.computed_ms == 20
        assert [link.receive()[0].number for _ in range(2)] == [2, 3]  # type: ignore[union-attr]
        assert link.computed_ms == 30

    def test_stale_steps_are_dropped_if_it_had_not(self, link: SimulatedLink) -> None:
        link.profile = WanProfile(rtt_ms=80)
        for number in range(1, 4):
            link.send(message(number))
        link.send(message(4, epoch=1))  # arrives with them
        assert [link.receive()[0].number for _ in range(1)] == [4]  # type: ignore[union-attr]
        assert link.computed_ms == 10

    def test_what_is_under_way_at_the_end_is_counted_and_forgotten(self, link: SimulatedLink) -> None:
        link.send(message(1))
        link.send(message(2))
        link.receive()
        link.forget_stale()
        assert link.computed_ms == 20
        link.send(message(3))
        frame = link.receive()[0]
        assert isinstance(frame, ResultFrame)
        assert frame.number == 3


class TestAnswers:
    """The loop, over a real verifier that computes in no time."""

    @pytest.fixture
    def target(self, llama_folder: Path, clock: Clock) -> DraftTarget:
        blueprint = Blueprint.open(llama_folder, FLOAT32)
        self.link = SimulatedLink(InProcessLink(load_verifier(blueprint, "tiny"), "float32"), clock)
        return DraftTarget(blueprint, self.link, "float32", clock=self.link.clock)

    def write(self, target: DraftTarget, drafter: Drafter, rtt_ms: float, in_flight: int) -> list[Committed]:
        self.link.profile = WanProfile(rtt_ms=rtt_ms)
        job = Job(PROMPT, Sampling(), COUNT, frozenset(), 8, in_flight=in_flight, clock=self.link.clock)
        blocks = list(decode(target, Session(), drafter, job))
        self.link.forget_stale()
        return blocks

    def tokens_of(self, blocks: list[Committed]) -> list[int]:
        return [token for block in blocks for token in block.tokens]

    def test_drafts_that_come_true_hide_the_round_trip(self, target: DraftTarget) -> None:
        truth = self.tokens_of(self.write(target, Nothing(), 0, 1))
        ms = {}
        for in_flight in (1, 4):
            blocks = self.write(target, Oracle([*PROMPT, *truth], block=4), 80, in_flight)
            assert self.tokens_of(blocks) == truth
            ms[in_flight] = sum(block.record.step_ms for block in blocks)
        # The first result has to be there before anything is sent ahead of the second.
        assert ms[1] == pytest.approx(80 * COUNT / 5)
        assert ms[4] < 0.6 * ms[1]

    def test_drafts_that_never_do_cost_the_cloud_and_change_nothing(self, target: DraftTarget) -> None:
        truth = self.tokens_of(self.write(target, Nothing(), 0, 1))
        blocks = self.write(target, Adversary([*PROMPT, *truth], block=4), 80, 4)
        assert self.tokens_of(blocks) == truth
        assert sum(block.record.step_ms for block in blocks) == pytest.approx(80 * COUNT)
        assert sum(block.record.stale for block in blocks) > COUNT / 2
        assert not any(block.record.ahead for block in blocks)
