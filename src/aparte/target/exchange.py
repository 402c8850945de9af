"""Steps sent over a link, and their results: what targets with a cloud have in common."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from aparte.errors import FrameError, LinkError, SilenceError
from aparte.step import Step
from aparte.wire.frames import Frame, ResultFrame, StepFrame, encode
from aparte.wire.link import Link

T = TypeVar("T")


@dataclass(frozen=True)
class _Sent(Generic[T]):
    """A step under way, and what its sender wants to know of it when it is back.

    The message is kept until then: it may have to be sent again.
    """

    step: Step
    note: T
    sent_at: float
    message: bytes


@dataclass(frozen=True)
class Arrived(Generic[T]):
    """A step's result. Times are in milliseconds, ``at`` is the clock's when it was all there."""

    step: Step
    note: T
    payload: bytes | memoryview
    at: float
    wait_ms: float
    cloud_ms: float
    queue_ms: float
    bytes_up: int
    bytes_down: int


class Exchange(Generic[T]):
    """Sends steps, hands out results in that order, skips those of abandoned steps, counts bytes.

    A lost connection shows where results are waited for, and only there. The steps under way stay so, and
    :meth:`open` sends them again.
    """

    def __init__(self, link: Link, clock: Callable[[], float] = time.perf_counter) -> None:
        self._link = link
        self._clock = clock
        self._pending: deque[_Sent[T]] = deque()
        self._stale: deque[int] = deque()  # numbers of abandoned steps that the cloud may yet answer
        self._lost: LinkError | None = None  # what ended the connection
        #: Bytes of all steps sent, and of all results read, since the beginning.
        self.bytes_up = 0
        self.bytes_down = 0

    def __bool__(self) -> bool:
        """Whether a step is under way that somebody waits for."""
        return bool(self._pending)

    def open(self) -> bool:
        """Make sure that there is a connection. False if the session is gone, and with it every step.

        If it is a new connection to the same session, what was not answered is sent again. Steps mean the
        same however often they come, so it makes no difference which of them the cloud had seen.
        """
        if not self._link.open():
            self.forget()
            return False
        if self._lost is not None:
            self._lost = None
            self._stale.clear()  # nobody answers those any more
            for sent in self._pending:
                self._transmit(sent.message)
        return True

    def send(self, step: Step, message: bytes, note: T) -> None:
        """Send ``step``, encoded as ``message``."""
        # The wait includes handing the message over.
        self._pending.append(_Sent(step, note, self._clock(), message))
        self._transmit(message)

    def receive(self) -> Arrived[T]:
        """The result of the oldest step under way.

        Results of stale steps are skipped: the cloud answers those that it began before it knew, in order.
        """
        sent = self._pending[0]
        while True:
            frame, size = self._next(sent.step)
            number = frame.number if isinstance(frame, ResultFrame) else None
            if number not in self._stale:
                break
            while self._stale.popleft() != number:
                pass
        self._stale.clear()  # the cloud dropped what it did not answer
        if not isinstance(frame, ResultFrame) or number != sent.step.number:
            raise FrameError(
                f"{self._link.where} answered something else than step {sent.step.number}. "
                "Is it the same version of aparte?"
            )
        self._pending.popleft()
        at = self._clock()
        return Arrived(
            sent.step,
            sent.note,
            frame.payload,
            at,
            wait_ms=(at - sent.sent_at) * 1e3,
            cloud_ms=frame.compute_ms,
            queue_ms=frame.queue_ms,
            bytes_up=len(sent.message),
            bytes_down=size,
        )

    def abandon(self) -> None:
        """Nobody will receive what is under way."""
        self._stale.extend(sent.step.number for sent in self._pending)
        self._pending.clear()

    def forget(self) -> None:
        """The session is gone, and with it everything under way."""
        self._pending.clear()
        self._stale.clear()
        self._lost = None

    def _transmit(self, message: bytes) -> None:
        """Hand a message to the link, unless its connection is lost. If it is, the message waits."""
        if self._lost is None:
            try:
                self._link.send(message)
            except LinkError as error:
                self._lost = error
            else:
                self.bytes_up += len(message)

    def _next(self, awaited: Step) -> tuple[Frame, int]:
        if self._lost is not None:
            raise self._lost
        try:
            frame, size = self._link.receive()
        except SilenceError as error:
            self._lost = error.about(f"step {awaited.number}")
            raise self._lost from None
        except LinkError as error:
            self._lost = error
            raise
        self.bytes_down += size
        return frame, size


def message_of(step: Step, payload: bytes | memoryview) -> bytes:
    """A step and its payload as one message."""
    return encode(StepFrame(step, payload))
