"""A link without a network: the middle runs in this process.

It goes through the same frames, so bytes are counted and numbers rounded as on the wire.
"""

from __future__ import annotations

from collections import deque

from aparte.cloud.batch import run_alone
from aparte.cloud.engine import Engine
from aparte.cloud.sessions import Session
from aparte.errors import LinkError
from aparte.wire.frames import Frame, ResultFrame, StepFrame, decode, encode
from aparte.wire.record import Tape


class InProcessLink:
    """A session of an :class:`~aparte.cloud.engine.Engine` in this process."""

    where = "The middle in this process"

    def __init__(self, engine: Engine, wire: str, tape: Tape | None = None) -> None:
        """``tape`` keeps what is said."""
        self._engine = engine
        self._tape = tape
        self._wire = wire
        self._session: Session | None = None
        self._waiting: deque[StepFrame] = deque()

    @property
    def max_nodes(self) -> int:
        return self._engine.limits.max_nodes_per_step

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    def open(self) -> bool:
        if self._session is not None:
            return True
        self._session = self._engine.open(self._wire)
        if self._tape:
            self._tape.opened()
        return False

    def send(self, message: bytes) -> None:
        request = decode(message)
        if self._session is None or not isinstance(request, StepFrame):
            raise LinkError(f"{self.where} only takes steps.")
        self._session.epoch = max(self._session.epoch, request.step.epoch)
        self._waiting.append(request)
        if self._tape:
            self._tape.up(message)

    def receive(self) -> tuple[Frame, int]:
        while self._session is not None and self._waiting:
            request = self._waiting.popleft()
            if request.step.epoch >= self._session.epoch:
                frame, answer = self._answer(self._session, request)
                if self._tape:
                    self._tape.down(answer)
                return frame, len(answer)
        raise LinkError(f"{self.where} has nothing to answer.")

    @staticmethod
    def _answer(session: Session, request: StepFrame) -> tuple[Frame, bytes]:
        computed = run_alone(session, request.step, request.payload)
        answer = encode(ResultFrame(request.step.number, computed.compute_ms, 0.0, computed.payload))
        return decode(answer), answer

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        self._waiting.clear()
