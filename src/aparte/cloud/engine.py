"""The middle and its sessions, without any network: steps in, hidden states out.

Everything here is written for a peer that may send anything. What a step may ask for is checked before
memory is taken; a session that breaks the rules ends, and no other session notices.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from aparte.config import ServerLimits
from aparte.errors import SlotError, UserError
from aparte.fingerprint import Fingerprint
from aparte.model.cache import SlotCache
from aparte.model.stage import Stage
from aparte.step import ROOT, Step
from aparte.wire.tensors import TensorCodec


class LimitError(UserError):
    """A step asks for more than the server's limits allow."""


@dataclass(frozen=True)
class Computed:
    """A step's answer: payload for the wire, and how long the forward pass took."""

    payload: memoryview
    compute_ms: float


class MiddleSession:
    """One device's cache, and the number format it talks in."""

    def __init__(self, stage: Stage, wire: str, width: int, limits: ServerLimits) -> None:
        self._stage = stage
        self._codec = TensorCodec(wire, width)
        self._limits = limits
        self._cache: SlotCache | None = stage.new_cache(limits.max_pending_nodes)
        #: The highest epoch seen; queued steps of older ones are not computed.
        self.epoch = 0

    @property
    def nbytes(self) -> int:
        """Bytes of cache held."""
        return self._cache.nbytes if self._cache else 0

    def check(self, step: Step, payload: bytes | memoryview) -> None:
        """Refuse what is out of bounds, from the header and the payload's size alone."""
        if len(step) > self._limits.max_nodes_per_step:
            raise LimitError(
                f"A step has {len(step)} nodes; this server takes {self._limits.max_nodes_per_step}."
            )
        # Nothing below the committed tip has a slot outside this range. The mask among such nodes is
        # quadratic in their number, so that an endless uncommitted chain would take all memory.
        pending = step.base + len(step) - (step.commit + 1)
        if pending > self._limits.max_pending_nodes:
            raise LimitError(
                f"A step leaves up to {pending} nodes uncommitted; "
                f"this server takes {self._limits.max_pending_nodes}."
            )
        self._codec.check_size(payload, len(step))

    def run(self, step: Step, payload: bytes | memoryview) -> Computed:
        """Run the middle over one step. Raises frame, slot, limit and overflow errors."""
        if self._cache is None:
            raise SlotError("The session was closed.")
        self.check(step, payload)
        started = time.perf_counter()
        hidden = self._codec.decode(payload, len(step))
        output = self._stage.forward(self._cache, step, hidden)
        return Computed(self._codec.encode(output), (time.perf_counter() - started) * 1e3)

    def close(self) -> None:
        """Free the cache."""
        self._cache = None


class Engine:
    """The served middle; opens sessions."""

    def __init__(
        self,
        stage: Stage,
        fingerprint: Fingerprint,
        width: int,
        limits: ServerLimits | None = None,
        dtype: str = "",
    ) -> None:
        """``width`` is the model's hidden size; ``dtype`` names the precision, for the device to know."""
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.limits = limits or ServerLimits()
        self._stage = stage
        self._width = width

    @property
    def max_context(self) -> int:
        return self._stage.max_context

    @property
    def max_message_bytes(self) -> int:
        """The largest message a device can have reason to send."""
        return self.limits.max_nodes_per_step * self._width * 4 + self.limits.header_bytes

    def open(self, wire: str) -> MiddleSession:
        """A new session. Raises :class:`UserError` for an unknown number format."""
        return MiddleSession(self._stage, wire, self._width, self.limits)

    def probe(self) -> None:
        """Send one node through the whole middle, so that "ready" means it works.

        Raises :class:`~aparte.errors.WireOverflowError` if what comes out is not finite.
        """
        session = self.open("float32")
        payload = bytes(self._width * 4)
        session.run(Step(number=0, epoch=0, commit=ROOT, base=0, parents=(ROOT,)), payload)
        session.close()
