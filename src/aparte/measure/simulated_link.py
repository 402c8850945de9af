"""A link by arithmetic: the middle runs in this process, and the network's time is added to the clock.

Nobody waits, so that one machine can measure many links in the time that computing takes. What computes is
real, and so are the bytes. Everything that times a step takes the link's clock, so step times, the node
budget, the pace of drafting and what is sent ahead come out as on such a link.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from aparte.answer import Writer
from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.device import wire_format
from aparte.measure.wan_link import WanProfile
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec
from aparte.wire.frames import Frame, ResultFrame, StepFrame, decode
from aparte.wire.link import Link

if TYPE_CHECKING:
    from aparte.config import Cut, WireName
    from aparte.model.parts import Blueprint, Progress

#: What a report says of figures that were measured like this.
LABEL = (
    "simulated: steps are computed and timed in this process; round trip and transfer of their bytes are "
    "added by arithmetic, and both sides count as computing at the same time"
)


def link_ms(profile: WanProfile, steps: int, size: int) -> float:
    """What the link takes for so many steps one after the other, of ``size`` bytes in all, up and down."""
    transfer_ms = 0.0 if profile.mbps is None else size * 8 / (profile.mbps * 1e3)
    return steps * profile.rtt_ms + transfer_ms


class SimulatedLink:
    """Another link, with the time that steps would have taken on the network added to :meth:`clock`.

    The other side computes in this process, when its answer is wanted; what the device does meanwhile is
    counted as done at the same time, as with a processor on each side. So several steps may be under way, on
    a line that carries one message after the other in each direction. Of steps that become stale the other
    side computes those that it would have begun before it could know.
    """

    def __init__(self, link: Link, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` gives seconds."""
        self._link = link
        self._clock = clock
        self._added_s = 0.0
        self._epoch = 0
        self._waiting: deque[float] = deque()  # when the steps that are not computed yet arrive there
        self._answers: deque[tuple[Frame, int, float]] = deque()  # computed, with the time they arrive here
        self._up_free = self._cloud_free = self._down_free = -math.inf
        #: What the other side says it computed since the beginning, stale steps included.
        self.computed_ms = 0.0
        #: What the network is like; to be changed between answers only.
        self.profile = WanProfile()

    def clock(self) -> float:
        """Seconds, those on the network included."""
        return self._clock() + self._added_s

    @property
    def where(self) -> str:
        return self._link.where

    @property
    def max_nodes(self) -> int:
        return self._link.max_nodes

    @property
    def max_context(self) -> int:
        return self._link.max_context

    def open(self) -> bool:
        return self._link.open()

    def send(self, message: bytes) -> None:
        self._up_free = max(self.clock(), self._up_free) + len(message) / self.profile.bytes_per_s
        arrives = self._up_free + self.profile.rtt_s / 2
        request = decode(message)
        if isinstance(request, StepFrame) and request.step.epoch > self._epoch:
            self._epoch = request.step.epoch
            self._compute_until(arrives)
            self._waiting.clear()  # the other side drops them unread
        self._link.send(message)
        self._waiting.append(arrives)

    def receive(self) -> tuple[Frame, int]:
        if not self._answers:
            self._compute()
        frame, size, due = self._answers.popleft()
        self._added_s += max(0.0, due - self.clock())
        return frame, size

    def forget_stale(self) -> None:
        """An answer is over, and with it what is still under way. It is computed, because nobody tells the
        other side, and counted; the messages are left out of the next answer's."""
        self._compute_until(math.inf)
        self._answers.clear()

    def close(self) -> None:
        self._link.close()
        self._waiting.clear()
        self._answers.clear()

    def _compute_until(self, moment: float) -> None:
        """All that the other side begins before ``moment``."""
        while self._waiting and max(self._waiting[0], self._cloud_free) < moment:
            self._compute()

    def _compute(self) -> None:
        """The oldest step that is not computed yet, while the clock stands still for this side."""
        started = self._clock()
        frame, size = self._link.receive()
        took_s = self._clock() - started
        self._added_s -= took_s
        arrives = self._waiting.popleft()
        begins = max(arrives, self._cloud_free)
        self._cloud_free = begins + took_s
        self._down_free = max(self._cloud_free, self._down_free) + size / self.profile.bytes_per_s
        if isinstance(frame, ResultFrame):
            self.computed_ms += frame.compute_ms
            frame = replace(frame, queue_ms=frame.queue_ms + (begins - arrives) * 1e3)
        self._answers.append((frame, size, self._down_free + self.profile.rtt_s / 2))


def open_simulated(
    blueprint: Blueprint,
    name: str,
    cut: Cut,
    *,
    wire: WireName = "auto",
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> tuple[Writer, SimulatedLink]:
    """Load a model, both sides, and put a simulated link between them."""
    number_format = wire_format(wire, blueprint)
    inner = InProcessLink(load_engine(blueprint, cut, name, progress=progress), number_format)
    link = SimulatedLink(inner, clock)
    target = SplitTarget(DeviceParts(blueprint, cut, progress), link, number_format, link.clock)
    return Writer(target, Codec(blueprint.checkpoint.folder), str(cut), clock=link.clock), link
