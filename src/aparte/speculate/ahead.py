"""Whether to send a step before the one before it is back, from what steps have cost so far.

A step sent ahead hangs below the end of the path that is most likely to be accepted. If that comes true,
its result arrives right behind the one before, and a link's latency is saved. If not, nobody waits for
it, but its work may have been in the way: on the device while the result was due, on the cloud and on the
way down when the next step came.
"""

from __future__ import annotations

from aparte.speculate.budget import StepCost
from aparte.speculate.pace import FADE, FadingMean
from aparte.target.base import Timing

#: What is gained has to exceed this share of a step's time: estimates are not that good.
MARGIN = 0.05
#: Predictions count as if so many had been right and made before.
TRUST_WEIGHT = 3.0


class SendAhead:
    """Learns what steps cost and how far probabilities are to be trusted; holds from answer to answer.

    It assumes the worst case of two sides that share their processors, where work is free only while
    messages are on their way: half the latency up for the device's, half of it down for the cloud's.
    """

    def __init__(self) -> None:
        self._wire = StepCost()  # the network's time by nodes: latency and transfer
        self._device_ms = FadingMean()
        self._cloud_ms = FadingMean()
        self._predicted = 0.0
        self._came_true = 0.0

    def likely(self, probability: float) -> float:
        """``probability``, corrected by how often such predictions came true."""
        trust = (self._came_true + TRUST_WEIGHT) / (self._predicted + TRUST_WEIGHT)
        return min(1.0, probability * trust)

    def pays(self, chance: float, nodes: int, in_flight: int = 1) -> bool:
        """Whether to send ``nodes`` nodes that are of use with ``chance``, with ``in_flight`` steps sent.

        Compares the expected gain, in milliseconds, with the expected loss.
        """
        device_ms, cloud_ms = self._device_ms.mean, self._cloud_ms.mean
        if device_ms is None or cloud_ms is None:
            return False
        latency_ms = self._wire.expect_ms(0)
        if (in_flight - 1) * (device_ms + cloud_ms) > latency_ms:
            return False  # both sides have enough to do until the next result
        transfer_ms = self._wire.ms_per_node * nodes
        loss_ms = max(0.0, device_ms - latency_ms / 2) + max(0.0, cloud_ms + transfer_ms - latency_ms / 2)
        step_ms = device_ms + latency_ms + transfer_ms + cloud_ms
        return chance * latency_ms > (1 - chance) * loss_ms + MARGIN * step_ms

    def observe(self, nodes: int, draft_ms: float, timing: Timing) -> None:
        """What a step of ``nodes`` nodes took that was sent with nothing else under way."""
        self._wire.observe(nodes, timing.rtt_ms)
        self._device_ms.add(draft_ms + timing.device_ms + timing.codec_ms)
        self._cloud_ms.add(timing.cloud_ms)

    def saw(self, probability: float, came_true: bool) -> None:
        """Whether something came true that was predicted with ``probability``."""
        self._predicted = FADE * self._predicted + probability
        self._came_true = FADE * self._came_true + came_true
