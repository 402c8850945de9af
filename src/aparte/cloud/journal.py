"""The server's log: a line per event, for people or as JSON. It never holds anything of a message.

An event has a name and fields, which are numbers, codes and the names of tokens. Other libraries' records
may hold anything (headers, values of tensors), so of them only origin, level and the exception's type are
written.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from time import monotonic
from typing import Any, TextIO

from aparte.config import one_of

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

log = logging.getLogger("aparte.cloud")


@dataclass
class Visit:
    """One connection that was greeted, for the line that says how it went."""

    session: int
    token: str | None
    steps: int = 0
    stale_steps: int = 0
    nodes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    _started: float = field(default_factory=monotonic)

    def began(self, *, resumed: bool) -> None:
        write(logging.INFO, "session_start", session=self.session, token=self.token, resumed=resumed)

    def ended(self, *, parked: bool) -> None:
        write(
            logging.INFO,
            "session_end",
            session=self.session,
            token=self.token,
            parked=parked,
            seconds=round(monotonic() - self._started, 3),
            steps=self.steps,
            stale_steps=self.stale_steps,
            nodes=self.nodes,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
        )


def write(level: int, event: str, **fields: Any) -> None:
    """Log an event. ``fields`` hold no content."""
    told = {name: value for name, value in fields.items() if value is not None}
    text = " ".join([event, *(f"{name}={value}" for name, value in told.items())])
    log.log(level, "%s", text, extra={"event": event, "fields": told})


class TextLines(logging.Formatter):
    """``2026-01-31T12:00:00.123Z info session_start session=1 resumed=False``."""

    def format(self, record: logging.LogRecord) -> str:
        said = record.getMessage() if hasattr(record, "event") else " ".join(_foreign(record).values())
        return f"{_when(record)} {record.levelname.lower()} {said}"


class JsonLines(logging.Formatter):
    """One object per line: ``time``, ``level``, ``event`` and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        event = getattr(record, "event", None)
        said = {"event": event, **getattr(record, "fields", {})} if event else _foreign(record)
        return json.dumps({"time": _when(record), "level": record.levelname.lower(), **said})


def check(form: str, level: str) -> None:
    """Raises :class:`UserError` for unknown names."""
    one_of(form, FORMATS, "log format")
    one_of(level, LEVELS, "log level")


def set_up(form: str = FORMATS[0], level: str = "info", stream: TextIO | None = None) -> None:
    """Log to ``stream``, standard error by default. Raises :class:`UserError` for unknown names."""
    check(form, level)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _when(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, timezone.utc)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _foreign(record: logging.LogRecord) -> dict[str, str]:
    """What may be told of a record that is no event: all of our own, of other libraries' next to nothing."""
    if record.name.startswith("aparte."):
        return {"event": "notice", "message": record.getMessage()}
    told = {"event": "library", "logger": record.name}
    if record.exc_info and record.exc_info[0]:
        told["error"] = record.exc_info[0].__name__
    return told
