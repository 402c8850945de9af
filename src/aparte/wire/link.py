"""What a split target needs of the way to its cloud."""

from __future__ import annotations

from typing import Protocol

from aparte.errors import (
    AparteError,
    DoorError,
    FrameError,
    LinkError,
    MismatchError,
    SlotError,
    UserError,
    WireOverflowError,
)
from aparte.wire.frames import ErrorFrame, Frame


class Link(Protocol):
    """Carries frames to one session of a cloud, in order, both ways."""

    @property
    def where(self) -> str:
        """The other side, for messages."""
        ...

    @property
    def max_nodes(self) -> int:
        """Most nodes per step."""
        ...

    @property
    def max_context(self) -> int:
        """Most positions of a sequence."""
        ...

    def open(self) -> bool:
        """Connect unless connected. True if the session of the last call is still there.

        If that connection was lost meanwhile, what had been sent and not answered has to be sent again.
        """
        ...

    def send(self, message: bytes) -> None:
        """Raises :class:`LinkError` if the cloud is gone."""
        ...

    def receive(self) -> tuple[Frame, int]:
        """The next frame and its size in bytes; an error frame is raised as an exception."""
        ...

    def close(self) -> None:
        """End the session; the cloud frees its cache."""
        ...


_BY_CODE: dict[str, type[AparteError]] = {
    "mismatch": MismatchError,
    "limit": UserError,
    "overflow": WireOverflowError,
    "slot": SlotError,
    "frame": FrameError,
    "denied": DoorError,
}


def error_from(frame: ErrorFrame, where: str) -> AparteError:
    """The exception that an error frame stands for."""
    error = _BY_CODE.get(frame.code, LinkError)(f"{where} says: {printable(frame.message)}")
    if isinstance(error, LinkError):
        error.retry_after_s = frame.retry_after_s
    return error


def printable(text: str) -> str:
    """``text`` without control characters: a cloud must not be able to steer the device's terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
