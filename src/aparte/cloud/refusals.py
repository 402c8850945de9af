"""Why the server ends a session, and the codes by which devices know it."""

from __future__ import annotations

from aparte.cloud.allowance import ShareError
from aparte.cloud.memory import RETRY_AFTER_S, FullError
from aparte.cloud.sessions import LimitError
from aparte.errors import (
    AparteError,
    DoorError,
    FrameError,
    MismatchError,
    SlotError,
    UserError,
    WireOverflowError,
)
from aparte.model.slab import SlabFullError


class BusyError(AparteError):
    """All sessions are taken."""

    retry_after_s = float(RETRY_AFTER_S)


class ExpiredError(AparteError):
    """The device sent nothing for too long."""


class EvictedError(ExpiredError):
    """An idle session had to make room."""

    def __init__(self) -> None:
        super().__init__("The session was idle, and its memory was needed for others.")


_CODES: tuple[tuple[type[AparteError], str], ...] = (
    (BusyError, "busy"),
    (FullError, "busy"),
    (SlabFullError, "busy"),
    (ShareError, "busy"),
    (ExpiredError, "expired"),
    (LimitError, "limit"),
    (MismatchError, "mismatch"),
    (FrameError, "frame"),
    (SlotError, "slot"),
    (WireOverflowError, "overflow"),
    (DoorError, "denied"),
    (UserError, "mismatch"),
)


def code_of(error: AparteError) -> str:
    """One of :data:`aparte.wire.frames.ERROR_CODES`."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "internal")
