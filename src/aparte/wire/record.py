"""``--record``: what the cloud saw, kept on the device for an audit.

A recording is a file of its owner alone (mode 0600). It begins with 14 bytes, ``aparte-record\\n``, the
length of a JSON header (4 bytes) and that header: ``format`` (1), ``version``, ``started`` and what the
device was (``target``, ``model``, ``cut``, ``wire``, ``width``, ``layers``, ``dtype``). After it comes one
record per message:

    | kind, 1 byte | link, 4 bytes | seconds since the start, 8 bytes (double) | length, 4 bytes | message |

All numbers are big-endian. ``kind`` is one of :class:`Kind`; ``link`` numbers the cloud addresses in use; the
message is the frame, byte for byte. Nothing in the file is ever executed or unpickled. It holds neither the
bearer token, which is no part of a frame, nor anything that never left the device.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from aparte import __version__
from aparte.errors import UserError

MAGIC = b"aparte-record\n"
FORMAT = 1
#: Where a recording ends, whatever is still to come.
MOST_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")
_RECORD = struct.Struct(">BIdI")
_MOST_ABOUT = 65_536


class Kind(enum.IntEnum):
    """What a record is."""

    UP = 0
    DOWN = 1
    #: A connection was made; no message.
    OPENED = 2


@dataclass(frozen=True)
class Message:
    """One record."""

    kind: Kind
    link: int
    at_s: float
    data: memoryview


class Recorder:
    """Writes a recording. Several links, in several threads, may share one."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """Raises :class:`UserError` if ``path`` exists, or cannot be made."""
        self.path = path
        #: Why the recording ends before its time, for people.
        self.failure = ""
        self._most_bytes = most_bytes
        self._written = 0
        self._links = itertools.count()
        self._lock = threading.Lock()
        self._started = time.monotonic()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise UserError(
                f"{path} exists, and a recording never replaces anything. Name another file."
            ) from None
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror or error}).") from None
        self._descriptor: int | None = descriptor

    def describe(self, about: dict[str, Any]) -> None:
        """Write the header. Only the first call counts."""
        with self._lock:
            if self._written:
                return
            started = datetime.now(timezone.utc).isoformat(timespec="seconds")
            header = {"format": FORMAT, "version": __version__, "started": started, **about}
            text = json.dumps(header).encode()
            self._write(b"".join((MAGIC, _LENGTH.pack(len(text)), text)))

    def tape(self) -> Tape:
        """For one more link."""
        return Tape(self, next(self._links))

    def add(self, kind: Kind, link: int, data: bytes) -> None:
        """Append a record, unless the recording has ended."""
        with self._lock:
            at_s = time.monotonic() - self._started
            self._write(b"".join((_RECORD.pack(kind, link, at_s, len(data)), data)))

    def close(self) -> None:
        """End the recording. A file into which nothing was written is removed."""
        with self._lock:
            if self._descriptor is None:
                return
            os.close(self._descriptor)
            self._descriptor = None
            if not self._written:
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def _write(self, data: bytes) -> None:
        """All of ``data`` or none of it. An answer never fails because its recording does."""
        if self._descriptor is None or self.failure:
            return
        if self._written + len(data) > self._most_bytes:
            self.failure = f"The recording ends after {self._written} bytes, its limit."
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.failure = f"The recording ends early: {error.strerror or error}."
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._written)
            return
        self._written += len(data)


class Tape:
    """The recording of one link."""

    def __init__(self, recorder: Recorder, link: int) -> None:
        self._recorder = recorder
        self._link = link

    def opened(self) -> None:
        """There is a new connection."""
        self._recorder.add(Kind.OPENED, self._link, b"")

    def up(self, message: bytes) -> None:
        """A message was sent."""
        self._recorder.add(Kind.UP, self._link, message)

    def down(self, message: bytes) -> None:
        """A message came."""
        self._recorder.add(Kind.DOWN, self._link, message)


@dataclass(frozen=True)
class Recording:
    """A recording that was read: its header, its records, and whether its end is missing."""

    about: dict[str, Any]
    messages: tuple[Message, ...]
    cut_short: bool


def read_recording(path: Path) -> Recording:
    """Raises :class:`UserError` for what is no recording. One that was cut short is read to its last whole
    record."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} is larger than a recording can be ({MOST_BYTES >> 20} MiB).")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from None
    start = len(MAGIC) + _LENGTH.size
    if not content.startswith(MAGIC) or len(content) < start:
        raise UserError(f"{path} is not a recording. `aparte generate … --record FILE` makes one.")
    (length,) = _LENGTH.unpack_from(content, len(MAGIC))
    try:
        if length > _MOST_ABOUT:
            raise ValueError
        about = json.loads(content[start : start + length])
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise UserError(f"The header of {path} is damaged. Record again.")
    if about.get("format") != FORMAT:
        raise UserError(f"{path} is of another version of aparte. Read it with the one that wrote it.")
    messages: list[Message] = []
    end = start + length
    for message, at in _records(memoryview(content), end):
        messages.append(message)
        end = at
    return Recording(about, tuple(messages), cut_short=end < len(content))


def _records(content: memoryview, at: int) -> Iterator[tuple[Message, int]]:
    """Each record and where it ends, up to the first that is not whole."""
    while at + _RECORD.size <= len(content):
        kind, link, at_s, length = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        if kind not in tuple(Kind) or length > len(content) - at:
            return
        yield Message(Kind(kind), link, at_s, content[at : at + length]), at + length
        at += length
