"""Every way in which a session can end has a code that devices know."""

from __future__ import annotations

import pytest

from aparte.cloud.memory import FullError
from aparte.cloud.refusals import BusyError, EvictedError, ExpiredError, code_of
from aparte.cloud.sessions import LimitError
from aparte.errors import (
    AparteError,
    CutError,
    FrameError,
    MismatchError,
    SlotError,
    UserError,
    WireOverflowError,
)
from aparte.wire.frames import ERROR_CODES


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BusyError(""), "busy"),
        (FullError(), "busy"),
        (ExpiredError(""), "expired"),
        (EvictedError(), "expired"),
        (LimitError(""), "limit"),
        (MismatchError(""), "mismatch"),
        (CutError(""), "mismatch"),
        (UserError(""), "mismatch"),
        (FrameError(""), "frame"),
        (SlotError(""), "slot"),
        (WireOverflowError(""), "overflow"),
        (AparteError(""), "internal"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_codes(error: AparteError, code: str) -> None:
    assert code_of(error) == code
    assert code in ERROR_CODES
