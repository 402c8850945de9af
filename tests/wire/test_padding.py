"""Padded frames say what they said before."""

from __future__ import annotations

import pytest

from aparte.errors import FrameError
from aparte.step import Step
from aparte.wire.frames import Frame, ResultFrame, StepFrame, decode, encode
from aparte.wire.padding import pad_header

FRAMES: list[Frame] = [
    StepFrame(Step(7, 1, 41, 42, (41, 42)), b"payload"),
    StepFrame(Step(123456, 99, 41, 900, (41, 41, 900)), b""),
    ResultFrame(7, 1.5, 0.25, b"\0" * 64),
]


@pytest.mark.parametrize("frame", FRAMES)
def test_a_padded_frame_reads_the_same_and_has_its_size(frame: Frame) -> None:
    message = pad_header(encode(frame), 200)
    assert decode(message) == frame
    assert len(message) == 4 + 200 + len(frame.payload)  # type: ignore[union-attr]


def test_a_header_that_is_too_long_is_refused_and_not_cut() -> None:
    message = encode(FRAMES[1])
    length = int.from_bytes(message[:4], "big")
    assert pad_header(message, length) == message
    with pytest.raises(FrameError, match=f"of {length} bytes"):
        pad_header(message, length - 1)
