"""Finished parts of an audit or another long run, kept in its folder: one with the same settings goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aparte.errors import UserError

FILE = "finished.jsonl"


class Store:
    """Parts by key. A part that was begun and not finished is done again."""

    def __init__(self, folder: Path, settings: dict[str, Any], what: str = "an audit") -> None:
        """Raises :class:`UserError` if the folder holds ``what`` with other settings."""
        self._file = folder / FILE
        self._parts: dict[str, Any] = {}
        #: What all finished parts took, those of interrupted runs included.
        self.seconds = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self._file.exists():
                self._file.write_text(json.dumps(settings) + "\n", encoding="utf-8")
                return
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"The folder {folder} cannot be used ({type(error).__name__}). Give another --out."
            ) from None
        rows = [row for row in map(_parsed, lines) if row is not None]
        if not rows or rows[0] != json.loads(json.dumps(settings)):
            raise UserError(
                f"{folder} holds {what} with other settings. Give another --out, or delete {self._file}."
            )
        self._parts = {row["key"]: row["value"] for row in rows[1:]}
        self.seconds = sum(float(row.get("took", 0)) for row in rows[1:])
        if lines and _parsed(lines[-1]) is None:  # what comes next needs a line of its own
            with self._file.open("a", encoding="utf-8") as file:
                file.write("\n")

    def part(self, key: str, make: Callable[[], Any]) -> Any:
        """The value of a part: kept from before, or made now and kept."""
        if key not in self._parts:
            started = time.perf_counter()
            value = make()
            took = round(time.perf_counter() - started, 2)
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"key": key, "value": value, "took": took}) + "\n")
            self._parts[key] = value
            self.seconds += took
        return self._parts[key]

    def __contains__(self, key: str) -> bool:
        """Whether a part is finished."""
        return key in self._parts


def _parsed(line: str) -> Any:
    """None for a line that an interruption cut short."""
    try:
        return json.loads(line)
    except ValueError:
        return None
