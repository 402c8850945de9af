"""The memory that sessions' caches may take together, and who has to leave when it is full.

Buffers come from a slab, which hands those of ended sessions on (:mod:`aparte.model.slab`). Those that lie
idle there count like any other and are the first to go. Room is made before a forward pass, never in one:
by ending the idle session that was used the longest time ago, then the next. If only busy ones are left, the
step is refused. The same goes for the share of one token's holder, among the sessions of that holder. While a
cache grows, one buffer of it is there twice for a moment; that is counted, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from aparte.cloud.batch import Job
from aparte.cloud.sessions import LimitError, Session
from aparte.errors import AparteError
from aparte.model import heap
from aparte.model.slab import FIRST_ROWS, IDLE_S, Slab

#: What a device that is refused is asked to wait.
RETRY_AFTER_S = 5
#: What share of the memory that is free at the start caches may take if nobody says how much.
SHARE_OF_FREE = {"cuda": 0.8, "cpu": 0.5}
#: How often it is looked what lies idle for long.
TIDY_INTERVAL_S = 10.0


class FullError(AparteError):
    """There is no memory for more."""

    retry_after_s = float(RETRY_AFTER_S)

    def __init__(self, whose: str = "The server's memory for sessions") -> None:
        super().__init__(f"{whose} is full. Try again in {RETRY_AFTER_S} s or later.")


class CacheMemory:
    """Keeps the caches of all sessions within ``budget`` bytes; None is no limit."""

    def __init__(
        self,
        budget: int | None,
        row_bytes: int = 0,
        *,
        session_budget: int | None = None,
        share_of: Callable[[str], int | None] = lambda name: None,
    ) -> None:
        """``row_bytes`` is what a node takes; 0 until a session's cache shows it.

        One session may have ``session_budget`` bytes, and those of the token called ``name`` together
        ``share_of(name)``.
        """
        self.budget = budget
        #: Where caches get their buffers from.
        self.slab = Slab(budget)
        self._row_bytes = row_bytes
        self._session_budget = session_budget
        self._share_of = share_of
        self._sessions: set[Session] = set()
        self._promised: defaultdict[str | None, int] = defaultdict(int)  # by whose token
        self._twice = 0  # bytes that will be there twice for a moment
        #: Sessions that had to leave.
        self.evicted = 0

    @property
    def held(self) -> int:
        """Bytes held by all sessions, those that ended in a pass that is under way included."""
        return self.slab.used

    def add(self, session: Session) -> None:
        """A session comes in. Raises :class:`FullError` if even a short text would find no room."""
        self._make_room(FIRST_ROWS * self.row_bytes, session)
        self._sessions.add(session)

    def remove(self, session: Session) -> None:
        """A session has ended; its cache is free."""
        self._sessions.discard(session)

    @property
    def row_bytes(self) -> int:
        """Bytes that a node takes; 0 while that is not known."""
        if not self._row_bytes:
            self._row_bytes = max((session.row_bytes for session in self._sessions), default=0)
        return self._row_bytes

    def settle(self) -> None:
        """No pass is under way: what was promised is held by now, or was not needed."""
        self._promised.clear()
        self._twice = 0

    def promise(self, job: Job, nodes: int) -> None:
        """Make room for the next ``nodes`` nodes of ``job``; if its cache has to grow, for all of them.

        Raises :class:`FullError` if there is none, and :class:`LimitError` if the session would become
        larger than any may be.
        """
        session = job.session
        growth = session.growth(job.part(nodes), self.row_bytes, job.rest - nodes)
        if not growth:
            return
        self._make_room(growth, session, twice=session.largest_buffer)
        self._promised[session.holder] += growth
        self._twice = max(self._twice, session.largest_buffer)

    async def tidy(self) -> None:
        """Give back to the system what lies idle for long, until cancelled."""
        while True:
            await asyncio.sleep(TIDY_INTERVAL_S)
            if self.slab.trim(IDLE_S):
                await asyncio.to_thread(_give_back)

    def _make_room(self, wanted: int, by: Session, twice: int = 0) -> None:
        if self._session_budget is not None and by.nbytes + wanted > self._session_budget:
            raise LimitError(
                f"This text needs a cache of {(by.nbytes + wanted) / 1e6:,.0f} MB, and this server gives a "
                f"session {self._session_budget / 1e6:,.0f} MB. Begin a shorter conversation."
            )
        if by.holder is not None and (share := self._share_of(by.holder)) is not None:
            own = {session for session in self._sessions if session.holder == by.holder}
            promised = self._promised.get(by.holder, 0)
            if not self._free(wanted + promised - share, by, own, lambda: sum(one.nbytes for one in own)):
                raise FullError("This token's share of the server's memory")
        if self.budget is not None:
            wanted += sum(self._promised.values()) + max(self._twice, twice)
            if not self._free(wanted - self.budget, by, self._sessions, lambda: self.slab.used):
                raise FullError

    def _free(self, wanted: int, by: Session, among: set[Session], held: Callable[[], int]) -> bool:
        """Have what is ``held`` and ``wanted`` sum up to nothing or less, if need be by evicting idle
        sessions ``among`` these, other than ``by``."""
        idle = sorted(
            (one for one in among if one.is_idle and one.nbytes and one is not by),
            key=lambda session: session.last_used,
            reverse=True,
        )
        while (missing := held() + wanted) > 0:
            # Nobody is sent away for nothing.
            if missing > sum(session.nbytes for session in idle):
                return False
            idle.pop().evict()
            self.evicted += 1
        return True


def _give_back() -> None:
    """What was freed may still be held by allocators, for the next time."""
    heap.trim()
    torch.cuda.empty_cache()  # does nothing where there is none


def free_bytes(device: torch.device) -> int | None:
    """What caches may take if nobody says: a share of the memory that is free now; None if that can't be
    found out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE["cuda"])
    free = [size for size in (_available(), _left_in_group()) if size is not None]
    return int(min(free) * SHARE_OF_FREE["cpu"]) if free else None


def _available() -> int | None:
    """Free memory of this machine, on Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_group() -> int | None:
    """What a container's memory limit leaves, if there is one."""
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = (group / "memory.current").read_text(encoding="ascii")
        return max(0, int(limit) - int(used))
    return None
