"""Measures the way to a cloud with steps of the protocol: round trip, jitter, and bandwidth each way.

A step of one node gives the round trip: its wait without what the cloud says it spent. Hidden states are as
large down as up, so that steps alone cannot tell the two bandwidths apart. But steps of an older epoch are
dropped unread: any number of them, and one of the present epoch behind, load the way up only. Then one large
step that is computed gives the way down. What is sent is zeros; nothing depends on any text.

Bandwidths are those of one connection, with what its TCP window allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from aparte.errors import FrameError
from aparte.step import ROOT, Step, chain_parents
from aparte.wire.frames import ResultFrame, StepFrame, encode
from aparte.wire.link import Link

#: A transfer is long enough to be measured once it takes this long.
LONG_MS = 40.0
_SHORT_MS = 1.0
#: What is sent at most to find that out. On a link that takes this in no time bandwidth is no limit.
MOST_BYTES = 4 << 20
_ROUND_TRIPS = 12
_REPEATS = 3
#: Nodes of the large step whose result measures the way down; the cloud has to compute them.
_MOST_DOWN_NODES = 128


@dataclass(frozen=True)
class LinkFigures:
    """What a link is like. Bandwidths in 10^6 bits per second; None is too fast to be measured."""

    rtt_ms: float
    jitter_ms: float
    mbps_up: float | None
    mbps_down: float | None
    cloud_ms: float


@dataclass(frozen=True)
class _Answer:
    """One exchange: how long it took, and what the cloud says of it."""

    wait_ms: float
    cloud_ms: float
    queue_ms: float
    size: int

    @property
    def network_ms(self) -> float:
        return max(0.0, self.wait_ms - self.cloud_ms - self.queue_ms)


class LinkProbe:
    """Probes an open link whose nodes have ``row_bytes`` bytes of hidden state.

    The session holds nothing of use afterwards: the next step of its owner has to begin an empty tree, in an
    epoch above :attr:`epoch`.
    """

    def __init__(self, link: Link, row_bytes: int) -> None:
        self._link = link
        self._row_bytes = row_bytes
        self._number = 0
        #: The epoch of the steps that were answered.
        self.epoch = 1

    def figures(self, round_trips: int = _ROUND_TRIPS) -> LinkFigures:
        """Measure everything; takes a second or so plus the round trips."""
        self._exchange([self._message(1)])  # the first one pays for what is set up
        answers = [self._exchange([self._message(1)]) for _ in range(round_trips)]
        trips = [answer.network_ms for answer in answers]
        base_ms = statistics.median(trips)
        up = self._up(base_ms)
        return LinkFigures(
            base_ms,
            jitter(trips),
            up,
            self._down(base_ms, up),
            statistics.median(answer.cloud_ms for answer in answers),
        )

    def _up(self, base_ms: float) -> float | None:
        """Stale steps, more and more until they take long enough."""
        nodes = 8
        messages = [self._message(nodes, stale=True)]
        while True:
            size = sum(map(len, messages))
            took_ms = self._up_ms(messages) - base_ms
            if took_ms >= LONG_MS or size >= MOST_BYTES:
                break
            if 2 * nodes <= self._most_nodes:
                nodes *= 2
                messages = [self._message(nodes, stale=True)]
            else:
                messages *= 2
        took_ms = min(took_ms, *(self._up_ms(messages) - base_ms for _ in range(_REPEATS - 1)))
        # Less than this is lost in what round trips differ by.
        return size * 8 / (took_ms * 1e3) if took_ms >= _SHORT_MS else None

    def _up_ms(self, messages: Sequence[bytes]) -> float:
        return self._exchange([*messages, self._message(1)]).network_ms

    def _down(self, base_ms: float, up: float | None) -> float | None:
        nodes = min(self._most_nodes, _MOST_DOWN_NODES)
        if up is not None:  # no longer than needed: the cloud computes these
            wanted = LONG_MS * up * 1e3 / 8 / self._row_bytes
            nodes = max(1, min(nodes, int(wanted)))
        message = self._message(nodes)
        answers = [self._exchange([message]) for _ in range(_REPEATS)]
        best = min(answers, key=lambda answer: answer.network_ms)
        up_ms = 0.0 if up is None else len(message) * 8 / (up * 1e3)
        left_ms = best.network_ms - base_ms - up_ms
        return best.size * 8 / (left_ms * 1e3) if left_ms >= _SHORT_MS else None

    @property
    def _most_nodes(self) -> int:
        return max(1, min(self._link.max_nodes, self._link.max_context // 2))

    def _message(self, nodes: int, *, stale: bool = False) -> bytes:
        self._number += 1
        step = Step(self._number, self.epoch - stale, ROOT, 0, chain_parents(ROOT, 0, nodes))
        return encode(StepFrame(step, bytes(nodes * self._row_bytes)))

    def _exchange(self, messages: Sequence[bytes]) -> _Answer:
        """Send, and wait for the result of the last one."""
        started = time.perf_counter()
        for message in messages:
            self._link.send(message)
        frame, size = self._link.receive()
        wait_ms = (time.perf_counter() - started) * 1e3
        if not isinstance(frame, ResultFrame):
            raise FrameError(f"{self._link.where} answered something else than a step.")
        return _Answer(wait_ms, frame.compute_ms, frame.queue_ms, size)


def jitter(trips: Sequence[float]) -> float:
    """Mean difference between one round trip and the next, as in RFC 3550."""
    if len(trips) < 2:
        return 0.0
    return statistics.fmean(abs(after - before) for before, after in pairwise(trips))
