"""Messages of equal size, whatever their headers say: spaces after the JSON, which its reader skips."""

from __future__ import annotations

import struct

from aparte.errors import FrameError

_LENGTH = struct.Struct(">I")


def pad_header(message: bytes, header_bytes: int) -> bytes:
    """``message``, a frame, with a header of exactly ``header_bytes``.

    Raises :class:`FrameError` if the header is longer than that.
    """
    (length,) = _LENGTH.unpack_from(message)
    if length > header_bytes:
        raise FrameError(f"A header of {length} bytes does not fit into {header_bytes}.")
    end = _LENGTH.size + length
    view = memoryview(message)
    return b"".join(
        (_LENGTH.pack(header_bytes), view[_LENGTH.size : end], b" " * (header_bytes - length), view[end:])
    )
