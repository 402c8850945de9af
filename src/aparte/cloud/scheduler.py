"""Who computes next, and with whom: between the sessions' queues and the one thread that computes.

Steps of different sessions share a forward pass. What is there when the thread is free goes, in the order of
arrival, and what comes meanwhile goes with the next pass. Putting a pass off by 2 or 5 ms for others to join
it was tried and made no more steps per second, mostly fewer. A session has one step here at a time, because
its steps build on each other, so that the order of arrival is a round robin.

How many nodes a shared pass has at most follows from what passes cost (:mod:`aparte.cloud.pass_cost`). A
step of more than half of that is cut into pieces, each of which waits for its turn like a step. Prompts,
which begin with a long chain, are cut into smaller ones, because others wait for every pass that they make
longer; trees of drafts are not, because their device waits for all of them. A session by itself is neither
cut nor kept waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from aparte.cloud.batch import Job, Outcome, Share
from aparte.cloud.engine import Engine
from aparte.cloud.memory import CacheMemory, FullError
from aparte.cloud.pass_cost import PassCost
from aparte.cloud.sessions import Computed, LimitError, Session

#: A session counts as active for so long after its last step, or the last answer.
ACTIVE_S = 5.0

_Answer = asyncio.Future[Computed | None]


class Scheduler:
    """Puts jobs into passes of ``engine``, which run on ``worker`` one after the other."""

    def __init__(
        self,
        engine: Engine,
        worker: Executor,
        memory: CacheMemory | None = None,
        on_pass: Callable[[int, int, float], None] = lambda sessions, nodes, pass_ms: None,
    ) -> None:
        """``on_pass`` is told of every pass: how many sessions and nodes it had, and how long it took."""
        self._engine = engine
        self._on_pass = on_pass
        self._memory = memory or CacheMemory(None)
        self._worker = worker
        self._cost = PassCost()
        self._waiting: deque[tuple[Job, _Answer]] = deque()
        self._seen: dict[Session, float] = {}  # when a session's last job came
        self._running: asyncio.Task[None] | None = None
        #: Forward passes so far, and those of more than one session.
        self.passes = 0
        self.shared_passes = 0

    @property
    def waiting(self) -> int:
        """Jobs that are in no pass at the moment."""
        return len(self._waiting)

    async def compute(self, job: Job) -> Computed | None:
        """The answer to a job, or None if it was stale before its turn came. Raises the job's own error."""
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._note_arrival(job.session)
        self._waiting.append((job, answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await answer

    def _note_arrival(self, session: Session) -> None:
        now = time.monotonic()
        self._seen = {other: seen for other, seen in self._seen.items() if now - seen < ACTIVE_S}
        self._seen[session] = now

    async def _run(self) -> None:
        """Passes, for as long as there is something to compute."""
        try:
            while self._waiting:
                if taken := self._take():
                    await self._pass(taken)
                    self._memory.settle()
        finally:
            self._running = None

    def _take(self) -> list[tuple[Share, _Answer]]:
        """Take what goes into the next pass out of the queue, and let go who waits for nothing."""
        self._memory.settle()
        alone = len(self._seen) == 1 and len(self._waiting) == 1
        room = self._cost.full
        piece, half = self._cost.piece, room // 2
        taken: list[tuple[Share, _Answer]] = []
        left: deque[tuple[Job, _Answer]] = deque()
        for job, answer in self._waiting:
            if answer.done():  # cancelled
                continue
            if job.stale:
                answer.set_result(None)
                continue
            nodes = job.rest if alone else min(job.rest, piece if job.chain > piece else half)
            if taken and nodes > room:
                left.append((job, answer))
                continue
            try:
                self._memory.promise(job, nodes)
            except (FullError, LimitError) as error:
                answer.set_exception(error)
                continue
            taken.append((Share(job, nodes), answer))
            room -= nodes
        self._waiting = left
        return taken

    async def _pass(self, taken: list[tuple[Share, _Answer]]) -> None:
        shares = [share for share, _ in taken]
        started = time.perf_counter()
        try:
            outcomes: list[Outcome] = await asyncio.get_running_loop().run_in_executor(
                self._worker, self._engine.run_pass, shares
            )
        except Exception as error:  # nothing that a session can cause; none of them may wait for ever
            outcomes = [error] * len(shares)
        else:
            nodes, pass_ms = sum(share.nodes for share in shares), (time.perf_counter() - started) * 1e3
            self._cost.observe(nodes, pass_ms)
            self._on_pass(len(shares), nodes, pass_ms)
        self.passes += 1
        self.shared_passes += len(shares) > 1
        for (share, answer), outcome in zip(taken, outcomes, strict=True):
            if answer.done():
                continue
            self._seen[share.job.session] = time.monotonic()
            if outcome is None:
                self._waiting.append((share.job, answer))
            elif isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        await asyncio.sleep(0)  # who got an answer may have the next step here already
