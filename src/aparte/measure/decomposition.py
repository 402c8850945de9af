"""Where the time of a step went: network, transfer, device, number formats, cloud and its queue.

Clocks of both sides are used, and never compared: the device times its own work and its waits, the cloud says
how long it computed and how long the step lay in its queue. What is left of a wait is the network's, and of
that the transfer is ``bytes over bandwidth``, each way, where that is known or fitted. Of a step sent
ahead only what did not overlap with the one before counts: an answer's parts add up to its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import fmean

from aparte.decode import StepRecord


@dataclass(frozen=True)
class Bandwidth:
    """Of a link, in 10^6 bits per second each way; None is unlimited or unknown."""

    mbps_up: float | None = None
    mbps_down: float | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of some steps' wall time, in milliseconds.

    ``latency_ms`` is the network's share without transfer; ``rest_ms`` what no clock accounts for: the loop
    itself between its parts.
    """

    device_ms: float = 0.0
    codec_ms: float = 0.0
    cloud_ms: float = 0.0
    queue_ms: float = 0.0
    up_ms: float = 0.0
    down_ms: float = 0.0
    latency_ms: float = 0.0
    rest_ms: float = 0.0

    @property
    def known_ms(self) -> float:
        """All but the rest."""
        return self.total_ms - self.rest_ms

    @property
    def total_ms(self) -> float:
        """Wall time."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def network_ms(self) -> float:
        """Latency and transfer."""
        return self.latency_ms + self.up_ms + self.down_ms

    def settled(self) -> Parts:
        """The same time without a negative rest, which is what parts shared: that is left out of them, of
        the latency first."""
        if self.rest_ms >= 0:
            return self
        return replace(_without(self, -self.rest_ms), rest_ms=0.0)

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def per(self, count: float) -> Parts:
        """The mean of ``count`` steps, or tokens."""
        return Parts(*(getattr(self, field.name) / count for field in fields(self)))

    @property
    def largest(self) -> str:
        """The part that most time goes to, with both ways of transfer as one: where to look first."""
        parts = {
            "latency": self.latency_ms,
            "transfer": self.up_ms + self.down_ms,
            "device": self.device_ms,
            "cloud": self.cloud_ms,
            "queue": self.queue_ms,
            "codec": self.codec_ms,
        }
        return max(parts, key=lambda name: parts[name])

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()} | {
            "total_ms": round(self.total_ms, 3)
        }


def transfer_ms(size: float, mbps: float | None) -> float:
    """Time that so many bytes take at a bandwidth."""
    return 0.0 if mbps is None else size * 8 / (mbps * 1e3)


def decompose(step: StepRecord, bandwidth: Bandwidth = Bandwidth()) -> Parts:
    """One step's parts. They add up to its wall time; ``rest_ms`` says how well the clocks account for it.

    Transfer is capped by what the network took, and shrinks on both ways alike if the bandwidth given is too
    low for the step. What a step sent ahead shared with the one before is left out: latency first, which is
    what sending ahead hides, then transfer, queue, cloud and the device's own parts.
    """
    timing = step.timing
    up_ms = transfer_ms(timing.bytes_up, bandwidth.mbps_up)
    down_ms = transfer_ms(timing.bytes_down, bandwidth.mbps_down)
    if up_ms + down_ms > timing.rtt_ms:
        shrink = timing.rtt_ms / (up_ms + down_ms)
        up_ms, down_ms = up_ms * shrink, down_ms * shrink
    parts = Parts(
        device_ms=timing.device_ms + step.draft_ms,
        codec_ms=timing.codec_ms,
        cloud_ms=timing.cloud_ms,
        queue_ms=timing.queue_ms,
        up_ms=up_ms,
        down_ms=down_ms,
        # Where transfer takes all of it, rounding may leave a little less than nothing.
        latency_ms=max(0.0, timing.rtt_ms - up_ms - down_ms),
    )
    if step.ahead:
        parts = _without(parts, parts.known_ms - step.step_ms)
    return parts + Parts(rest_ms=step.step_ms - parts.known_ms)


#: In this order parts are taken to be hidden behind the step before.
_HIDDEN = ("latency_ms", "up_ms", "down_ms", "queue_ms", "cloud_ms", "codec_ms", "device_ms")


def _without(parts: Parts, hidden_ms: float) -> Parts:
    """``parts`` with so much less, if it is more than nothing."""
    left: dict[str, float] = {}
    for name in _HIDDEN:
        value = getattr(parts, name)
        left[name] = value - max(0.0, min(value, hidden_ms))
        hidden_ms -= value - left[name]
    return replace(parts, **left)


def decompose_all(steps: Iterable[StepRecord], bandwidth: Bandwidth = Bandwidth()) -> Parts:
    """The sum over steps."""
    total = Parts()
    for step in steps:
        total += decompose(step, bandwidth)
    return total


def waited_for(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps whose times stand for themselves: without the first, which carries the prompt, and without those
    that were sent ahead or came after ones that were, whose times overlap."""
    return [step for before, step in pairwise(steps) if not (step.ahead or step.stale or before.ahead)]


#: Steps that a bandwidth is fitted to at least, and how many of its errors it has to be away from nothing.
_FEWEST_STEPS, _LEAST_SIGNAL = 8, 4.0


def fitted_bandwidth(steps: Sequence[StepRecord]) -> Bandwidth:
    """The bandwidth, the same both ways, that explains why larger steps take longer on the network.

    Unknown unless the steps differ in size and their times follow it clearly.
    """
    waited = waited_for(steps)
    if len(waited) < _FEWEST_STEPS:
        return Bandwidth()
    sizes = [float(step.timing.bytes_up + step.timing.bytes_down) for step in waited]
    times = [step.timing.rtt_ms for step in waited]
    mean_size, mean_time = fmean(sizes), fmean(times)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    if not spread:
        return Bandwidth()
    slope = sum((s - mean_size) * (t - mean_time) for s, t in zip(sizes, times, strict=True)) / spread
    missed = sum((t - mean_time - slope * (s - mean_size)) ** 2 for s, t in zip(sizes, times, strict=True))
    error = math.sqrt(missed / (len(waited) - 2) / spread)
    if slope <= _LEAST_SIGNAL * error or slope <= 0:
        return Bandwidth()
    mbps = 8 / (slope * 1e3)
    return Bandwidth(mbps, mbps)
