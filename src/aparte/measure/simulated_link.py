"""A link by arithmetic: the middle runs in this process, and the network's time is added to the clock.

Nobody waits, so that one machine can measure many links in the time that computing takes. What computes is
real, and so are the bytes. Everything that times a step takes the link's clock, so step times, the node
budget and the pace of drafting come out as on such a link.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from aparte.answer import Writer
from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.device import wire_format
from aparte.measure.wan_link import WanProfile
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec
from aparte.wire.frames import Frame
from aparte.wire.link import Link

if TYPE_CHECKING:
    from aparte.config import Cut, WireName
    from aparte.model.parts import Blueprint, Progress

#: What a report says of figures that were measured like this.
LABEL = (
    "simulated: steps are computed and timed in this process; round trip and transfer of their bytes, both "
    "ways one after the other, are added by arithmetic"
)


def link_ms(profile: WanProfile, steps: int, size: int) -> float:
    """What the link takes for so many steps one after the other, of ``size`` bytes in all, up and down."""
    transfer_ms = 0.0 if profile.mbps is None else size * 8 / (profile.mbps * 1e3)
    return steps * profile.rtt_ms + transfer_ms


class SimulatedLink:
    """Another link, with the time that a step would have taken on the network added to :meth:`clock`.

    It is for one step at a time, and none ever stale. Chunks of a prompt, sent ahead of the first step, each
    count a whole round trip, so the time to the first token is too long.
    """

    def __init__(self, link: Link, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` gives seconds."""
        self._link = link
        self._clock = clock
        self._added_s = 0.0
        self._sent: deque[int] = deque()  # sizes of the messages that are not answered yet
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
        self._link.send(message)
        self._sent.append(len(message))

    def receive(self) -> tuple[Frame, int]:
        frame, size = self._link.receive()
        self._added_s += link_ms(self.profile, 1, self._sent.popleft() + size) / 1e3
        return frame, size

    def close(self) -> None:
        self._link.close()
        self._sent.clear()


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
