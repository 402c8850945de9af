"""What an error frame becomes on the device."""

from __future__ import annotations

import pytest

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
from aparte.wire.frames import ERROR_CODES, ErrorFrame
from aparte.wire.link import error_from

KINDS: dict[str, type[AparteError]] = {
    "mismatch": MismatchError,
    "frame": FrameError,
    "slot": SlotError,
    "limit": UserError,
    "overflow": WireOverflowError,
    "expired": LinkError,
    "busy": LinkError,
    "denied": DoorError,
    "internal": LinkError,
    "a code of a later version": LinkError,
}


@pytest.mark.parametrize("code", [*ERROR_CODES, "a code of a later version"])
def test_every_code_is_an_exception_that_says_who_says_what(code: str) -> None:
    error = error_from(ErrorFrame(code, "It is so."), "The cloud at ws://x")
    assert type(error) is KINDS[code]
    assert str(error) == "The cloud at ws://x says: It is so."


def test_a_cloud_cannot_steer_the_devices_terminal() -> None:
    error = error_from(ErrorFrame("busy", "a\x1b[2Jb\r\nc\u009bd\u202ee\ud800 \u00e9"), "X")
    assert str(error) == "X says: a?[2Jb??c?d?e? \u00e9"
