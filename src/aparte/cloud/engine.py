"""The served stage and its sessions, without any network: steps in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aparte.cloud.batch import Outcome, Share, run_alone, run_pass
from aparte.cloud.sessions import MiddleSession, Session
from aparte.config import Cut, ServerLimits
from aparte.errors import MismatchError, UserError
from aparte.fingerprint import Fingerprint
from aparte.model.slab import Slab
from aparte.model.stage import Stage
from aparte.model.windows import WANTED
from aparte.step import ROOT, Step


@dataclass(frozen=True)
class Part:
    """What a session is served: all of the hosted layers, or some of them."""

    stage: Stage
    fingerprint: Fingerprint


class Engine:
    """The served middle; opens sessions and computes for them."""

    def __init__(
        self,
        stage: Stage,
        fingerprint: Fingerprint,
        width: int,
        limits: ServerLimits | None = None,
        dtype: str = "",
        inner: Callable[[Cut], Fingerprint] | None = None,
    ) -> None:
        """``width`` is the model's hidden size; ``dtype`` names the precision, for the device to know.

        With ``inner``, which takes the fingerprint at a cut, a session may ask for some of the layers only.
        """
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.limits = limits or ServerLimits()
        #: Bytes of cache that a node takes, once :meth:`probe` knows.
        self.row_bytes = 0
        #: Where sessions get memory from; a server puts its own here.
        self.slab = Slab(keep=False)
        self._stage = stage
        self._width = width
        self._inner = inner
        self._parts: dict[str, Part] = {}  # by cut; there are no more than pairs of layers

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

    def check(self, asked: Fingerprint) -> None:
        """Raise :class:`MismatchError` unless a session can be given what it asks for."""
        part = self._part(asked.cut)
        own = self.fingerprint if part is None else part.fingerprint
        try:
            own.check(asked)
        except MismatchError as error:
            if self._inner is None and self._layers_at(asked.cut):
                raise MismatchError(
                    f"{error} Or start the server with --inner-cuts, which lets devices use fewer of its "
                    "layers."
                ) from None
            raise

    def open(self, wire: str, cut: str = "") -> Session:
        """A new session, for the cut that was checked or else for all that is hosted.

        Raises :class:`UserError` for an unknown number format.
        """
        part = self._part(cut)
        session = self.new_session(self._stage if part is None else part.stage, wire)
        session.part = part
        return session

    def new_session(self, stage: Stage, wire: str) -> Session:
        """A session that computes with ``stage``."""
        return MiddleSession(stage, wire, self._width, self.limits, self.slab)

    def served(self, session: Session) -> Fingerprint:
        """What the session is given."""
        return self.fingerprint if session.part is None else session.part.fingerprint

    def run_pass(self, shares: Sequence[Share]) -> list[Outcome]:
        """One forward pass for several sessions; one session's error is its own result.

        Sessions of different cuts do not share it: they pass one after the other.
        """
        groups: dict[Part | None, list[int]] = {}
        for index, share in enumerate(shares):
            groups.setdefault(share.job.session.part, []).append(index)
        outcomes: dict[int, Outcome] = {}
        for part, indices in groups.items():
            stage = self._stage if part is None else part.stage
            found = run_pass(stage, [shares[index] for index in indices])
            outcomes.update(zip(indices, found, strict=True))
        return [outcomes[index] for index in range(len(shares))]

    def _part(self, cut: str) -> Part | None:
        """The part for a cut inside the hosted one, if such are allowed; None for what is hosted."""
        layers = self._layers_at(cut)
        if self._inner is None or not layers:
            return None
        if cut not in self._parts:
            self._parts[cut] = Part(self._stage.part(layers), self._inner(Cut.parse(cut)))
        return self._parts[cut]

    def _layers_at(self, cut: str) -> range:
        """The layers of a cut inside the hosted one; none for any other text."""
        hosted = self._stage.layer_indices
        try:
            asked, own = Cut.parse(cut), Cut.parse(self.fingerprint.cut)
        except UserError:
            return range(0)
        front, back = asked.front - own.front, asked.back - own.back
        if cut != str(asked) or asked == own or min(front, back) < 0 or front + back >= len(hosted):
            return range(0)
        return range(hosted.start + front, hosted.stop - back)

    def probe(self) -> None:
        """Send a node through the whole middle, so that "ready" means it works.

        Raises :class:`~aparte.errors.WireOverflowError` if what comes out is not finite.
        """
        self._probe(bytes(self._width * 4))

    def _probe(self, payload: bytes) -> None:
        """Steps of one node each: one, or as many as it takes until they are recorded."""
        session = self.open("float32")
        for number in range(1 + (WANTED if self._stage.recordings else 0)):
            tip = number - 1 if number else ROOT
            run_alone(session, Step(number, 0, tip, number, (tip,)), payload)
        self.row_bytes = session.row_bytes
        session.close()
