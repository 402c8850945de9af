"""The served stage and its sessions, without any network: steps in, answers out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aparte.cloud.batch import Outcome, Share, run_alone, run_pass
from aparte.cloud.sessions import MiddleSession, Session
from aparte.config import ServerLimits
from aparte.fingerprint import Fingerprint
from aparte.model.stage import Stage
from aparte.step import ROOT, Step


class Engine:
    """The served middle; opens sessions and computes for them."""

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
        #: Bytes of cache that a node takes, once :meth:`probe` knows.
        self.row_bytes = 0
        self._stage = stage
        self._width = width

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self._stage.device

    @property
    def max_context(self) -> int:
        return self._stage.max_context

    @property
    def max_message_bytes(self) -> int:
        """The largest message a device can have reason to send."""
        return self.limits.max_nodes_per_step * self._width * 4 + self.limits.header_bytes

    def open(self, wire: str) -> Session:
        """A new session. Raises :class:`UserError` for an unknown number format."""
        return MiddleSession(self._stage, wire, self._width, self.limits)

    def run_pass(self, shares: Sequence[Share]) -> list[Outcome]:
        """One forward pass for several sessions; one session's error is its own result."""
        return run_pass(self._stage, shares)

    def probe(self) -> None:
        """Send one node through the whole middle, so that "ready" means it works.

        Raises :class:`~aparte.errors.WireOverflowError` if what comes out is not finite.
        """
        session = self.open("float32")
        payload = bytes(self._width * 4)
        run_alone(session, Step(number=0, epoch=0, commit=ROOT, base=0, parents=(ROOT,)), payload)
        self.row_bytes = session.row_bytes
        session.close()
