"""Buffers for keys and values, which are handed on from one session to the next.

Buffers come in few sizes (:func:`size_class`), so that one that a session gives back fits a later one. Those
that nobody uses stay in the slab: many short sessions, one after the other, get the same memory again and
again, and leave no holes that are too small for anybody. The slab counts what is used and what lies idle, to
the byte, and keeps both together within its budget. Idle buffers go when others need the room, the longest
idle first, and after some time in any case.

A buffer is all zeros when it is handed out, so that nobody ever reads another session's numbers.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch

from aparte.errors import AparteError

#: The smallest class, in rows.
FIRST_ROWS = 256
#: From here on there is a class halfway between two powers of two.
HALVES_FROM = 512
#: Idle buffers may make so much of the most that sessions ever had at a time, used ones included: sizes that
#: were wanted once and are not any more would add up otherwise.
MOST_KEPT = 1.25
#: How long a buffer lies idle before it is given back to the system.
IDLE_S = 60.0

_Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class SlabFullError(AparteError):
    """The budget has no room for a buffer."""

    retry_after_s = 5.0

    def __init__(self, size: int, budget: int) -> None:
        super().__init__(
            f"Another {size / 1e6:,.1f} MB of keys and values do not fit into the {budget / 1e6:,.1f} MB "
            "that there are for sessions. Try again later, or with a shorter text."
        )


def size_class(rows: int, most: int) -> int:
    """The smallest class that holds so many rows: 256, 512, 768, 1024, 1536, 2048, …, and at last ``most``.

    Beyond 512 rows a buffer is at most half as large again as what was asked for.
    """
    size = FIRST_ROWS
    while size < rows:
        if size < HALVES_FROM:
            size *= 2
        else:  # 2^k, then 3 * 2^(k-1), then 2^(k+1)
            size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


class Slab:
    """Buffers in use and idle ones, of ``budget`` bytes together at most; None is no limit.

    Without ``keep`` nothing stays: whatever is given back is free at once. Buffers may be given back by any
    thread, and by the garbage collector.
    """

    def __init__(
        self, budget: int | None = None, *, keep: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget = budget
        self._keep = keep
        self._clock = clock
        self._lock = threading.Lock()
        self._returned: deque[torch.Tensor] = deque()  # to be counted by whoever has the lock next
        self._idle: dict[_Kind, deque[tuple[float, torch.Tensor]]] = {}  # the longest idle first
        self._used_bytes = 0
        self._idle_bytes = 0
        self._most_used_bytes = 0
        self._peak_bytes = 0

    @property
    def used(self) -> int:
        """Bytes of the buffers that sessions have."""
        with self._lock:
            self._collect()
            return self._used_bytes

    @property
    def idle(self) -> int:
        """Bytes of those that nobody has."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    @property
    def peak(self) -> int:
        """The most that there ever was of both together."""
        return self._peak_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of zeros. Raises :class:`SlabFullError`, before anything is allocated."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            self._collect()
            kind = (shape, dtype, device)
            # The one that came last, whose memory is the likeliest to be in a processor's cache.
            buffer = self._pop(kind, -1) if kind in self._idle else None
            if buffer is None:
                self._make_room(size)
            self._used_bytes += size
            self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
            self._peak_bytes = max(self._peak_bytes, self._used_bytes + self._idle_bytes)
        if buffer is not None:
            buffer.view(torch.uint8).zero_()
            return buffer
        try:
            return self._new(shape, dtype, device)
        except BaseException:
            with self._lock:
                self._used_bytes -= size
            raise

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, whole. Nobody may use it any more."""
        self._returned.append(buffer)
        if self._lock.acquire(blocking=False):  # the garbage collector may call while this thread holds it
            try:
                self._collect()
            finally:
                self._lock.release()

    def trim(self, idle_s: float = 0.0) -> int:
        """Free what has been idle for so long, in seconds; returns how many bytes that were."""
        with self._lock:
            self._collect()
            before, latest = self._idle_bytes, self._clock() - idle_s
            for kind in tuple(self._idle):
                while kind in self._idle and self._idle[kind][0][0] <= latest:
                    self._pop(kind, 0)
            return before - self._idle_bytes

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return allocate(shape, dtype, device)
        except (RuntimeError, OSError, MemoryError):  # the machine has no more, though the budget has
            if not self.trim():
                raise
        return allocate(shape, dtype, device)

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._used_bytes -= buffer.nbytes
            if self._keep:
                self._idle_bytes += buffer.nbytes
                kind = (tuple(buffer.shape), buffer.dtype, buffer.device)
                self._idle.setdefault(kind, deque()).append((self._clock(), buffer))

    def _make_room(self, size: int) -> None:
        wanted = self._used_bytes + size
        if self.budget is not None and wanted > self.budget:
            raise SlabFullError(size, self.budget)
        kept = MOST_KEPT * max(self._most_used_bytes, wanted)
        most = kept if self.budget is None else min(kept, self.budget)
        while wanted + self._idle_bytes > most:
            self._pop(min(self._idle, key=lambda kind: self._idle[kind][0][0]), 0)

    def _pop(self, kind: _Kind, end: Literal[0, -1]) -> torch.Tensor:
        """Take out the longest idle buffer of that kind, or the one that came last; there is one."""
        idle = self._idle[kind]
        _, buffer = idle.pop() if end else idle.popleft()
        self._idle_bytes -= buffer.nbytes
        if not idle:
            del self._idle[kind]
        return buffer


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new buffer of zeros. Raises what the system does if it has no memory.

    On Linux's own memory it is mapped: what is freed goes back to the system whole, where the C library would
    keep it, with holes.
    """
    if device.type != "cpu" or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
