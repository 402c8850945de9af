"""Sessions: one device's cache in the served stage, and what its payloads mean.

Everything here is written for a peer that may send anything. What a step may ask for is checked before
memory is taken; a session that breaks the rules ends, and no other session notices.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aparte.cloud.acceptance import Acceptance
from aparte.config import ServerLimits
from aparte.errors import SlotError, UserError
from aparte.model.cache import SlotCache
from aparte.model.slab import Slab
from aparte.model.stage import Stage
from aparte.step import ROOT, Step
from aparte.wire.tensors import TensorCodec

if TYPE_CHECKING:
    from aparte.cloud.engine import Part


class LimitError(UserError):
    """A step asks for more than the server's limits allow."""


@dataclass(frozen=True)
class Computed:
    """A step's answer: payload for the wire, and how long the forward pass took.

    ``company`` is how many sessions shared the pass; its time is not divided among them. Of a step that
    went through in pieces ``compute_ms`` is the sum of its passes and ``company`` the largest.
    """

    payload: memoryview
    compute_ms: float
    company: int = 1


class Session(ABC):
    """One device's cache in ``stage``. Subclasses turn payloads into hidden states, and back."""

    #: A layer whose output :meth:`finish` wants as well.
    tap: int | None = None
    #: Which of the hosted layers it is served, if not all of them.
    part: Part | None = None

    def __init__(self, stage: Stage, limits: ServerLimits, slab: Slab) -> None:
        """The cache's memory comes from ``slab``."""
        self.stage = stage
        self._limits = limits
        self._cache: SlotCache | None = stage.new_cache(limits.max_pending_nodes, slab)
        #: The highest epoch seen; queued steps of older ones are not computed.
        self.epoch = 0
        #: The device is gone: nobody will read an answer.
        self.abandoned = False
        #: Steps that came and are not answered yet, and when the newest one came (monotonic seconds).
        self.unanswered = 0
        self.last_used = time.monotonic()
        self.acceptance = Acceptance()
        #: The name of the token that opened it, None where there are no tokens.
        self.holder: str | None = None
        #: Called when the memory is needed for others.
        self.on_evict: Callable[[], None] = lambda: None

    @property
    def cache(self) -> SlotCache:
        """Raises :class:`SlotError` once the session is closed."""
        if self._cache is None:
            raise SlotError("The session was closed.")
        return self._cache

    @property
    def closed(self) -> bool:
        return self._cache is None

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
        if step.commit == ROOT and step.base == self.stage.rotary_switch:
            held = self._cache.tree.root if self._cache else ROOT
            if not 0 <= held < step.base:  # a long text begins here (aparte.step), and nothing stays
                pending = len(step)
        if pending > self._limits.max_pending_nodes:
            raise LimitError(
                f"A step leaves up to {pending} nodes uncommitted; "
                f"this server takes {self._limits.max_pending_nodes}."
            )
        self.check_payload(step, payload)

    @abstractmethod
    def check_payload(self, step: Step, payload: bytes | memoryview) -> None:
        """Refuse a payload of the wrong size."""

    @abstractmethod
    def read(self, step: Step, payload: bytes | memoryview) -> torch.Tensor:
        """What goes into the stage, ``[n, D]``. Raises for contents that are out of bounds."""

    @abstractmethod
    def finish(self, step: Step, hidden: torch.Tensor, tapped: torch.Tensor | None) -> memoryview:
        """The answer's payload, from what came out of the stage and of the layer ``tap``, ``[n, D]``."""

    def begin(self, step: Step, payload: bytes | memoryview) -> torch.Tensor:
        """Check a step and read its payload, ``[n, D]``. Raises frame, slot and limit errors."""
        if self._cache is None:
            raise SlotError("The session was closed.")
        self.check(step, payload)
        return self.read(step, payload)

    def growth(self, step: Step, row_bytes: int, ahead: int = 0) -> int:
        """Bytes of cache that ``step`` will need beyond those held, with ``ahead`` more nodes to come."""
        return self._cache.growth(step, row_bytes, ahead) if self._cache else 0

    @property
    def largest_buffer(self) -> int:
        """Bytes that are there twice for a moment when the cache grows."""
        return self._cache.largest_buffer if self._cache else 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer, and no forward pass uses the cache."""
        return self.unanswered <= 0 and not (self._cache is not None and self._cache.in_pass)

    @property
    def row_bytes(self) -> int:
        """Bytes that a node takes, 0 while that is not known."""
        return self._cache.row_bytes if self._cache else 0

    def close(self) -> None:
        """Free the cache; in a pass that is under way, at its end."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def evict(self) -> None:
        """Free the cache because others need the memory."""
        self.close()
        self.on_evict()


class MiddleSession(Session):
    """Hidden states in, hidden states out, in the number format that the device talks in."""

    def __init__(self, stage: Stage, wire: str, width: int, limits: ServerLimits, slab: Slab) -> None:
        super().__init__(stage, limits, slab)
        self._codec = TensorCodec(wire, width)

    def check_payload(self, step: Step, payload: bytes | memoryview) -> None:
        self._codec.check_size(payload, len(step))

    def read(self, step: Step, payload: bytes | memoryview) -> torch.Tensor:
        return self._codec.decode(payload, len(step))

    def finish(self, step: Step, hidden: torch.Tensor, tapped: torch.Tensor | None) -> memoryview:  # noqa: ARG002
        return self._codec.encode(hidden)
