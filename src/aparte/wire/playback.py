"""A recording as the cloud's sessions: which steps came, what was answered, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aparte.errors import FrameError
from aparte.wire.frames import ErrorFrame, Frame, Hello, ResultFrame, StepFrame, Welcome, decode
from aparte.wire.record import Kind, Message


@dataclass
class Exchange:
    """A step, and its result if there was one. Sizes are those of the whole messages."""

    sent: StepFrame
    at_s: float
    bytes_up: int
    result: ResultFrame | None = None
    answered_at_s: float = 0.0
    bytes_down: int = 0

    @property
    def wait_ms(self) -> float | None:
        return None if self.result is None else (self.answered_at_s - self.at_s) * 1e3


@dataclass
class Visit:
    """One session at the cloud, over as many connections as it took."""

    link: int
    at_s: float
    exchanges: list[Exchange] = field(default_factory=list)
    connections: int = 1
    #: The codes of error frames.
    errors: list[str] = field(default_factory=list)
    #: Messages that are no frames of this protocol.
    damaged: int = 0

    def step(self, message: Message, frame: StepFrame) -> None:
        self.exchanges.append(Exchange(frame, message.at_s, len(message.data)))

    def result(self, message: Message, frame: ResultFrame) -> None:
        """A step that was sent again was answered once: the last of its number gets the answer."""
        for exchange in reversed(self.exchanges):
            if exchange.sent.step.number == frame.number and exchange.result is None:
                exchange.result = frame
                exchange.answered_at_s = message.at_s
                exchange.bytes_down = len(message.data)
                return


def visits(messages: Iterable[Message]) -> list[Visit]:
    """The sessions in the order in which they began. One that went on after a lost connection is one."""
    found: list[Visit] = []
    current: dict[int, Visit] = {}
    before: dict[int, Visit] = {}  # of the connection before, until a welcome says which it is
    for message in messages:
        link = message.link
        if message.kind is Kind.OPENED or link not in current:
            if link in current:
                before[link] = current[link]
            current[link] = Visit(link, message.at_s)
            found.append(current[link])
        if message.kind is Kind.OPENED:
            continue
        visit = current[link]
        frame = _frame(message)
        match frame:
            case None:
                visit.damaged += 1
            case StepFrame():
                visit.step(message, frame)
            case ResultFrame():
                visit.result(message, frame)
            case ErrorFrame():
                visit.errors.append(frame.code)
            case Welcome() if frame.resumed and link in before:
                found.remove(visit)
                current[link] = before.pop(link)
                current[link].connections += 1
            case Welcome() | Hello():
                pass
    return [visit for visit in found if visit.exchanges or visit.errors or visit.damaged]


def _frame(message: Message) -> Frame | None:
    try:
        return decode(message.data)  # type: ignore[arg-type]
    except FrameError:
        return None
