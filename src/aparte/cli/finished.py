"""The file of finished rows by which a long measurement goes on after an interruption (``--resume``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aparte.errors import UserError


def finished_rows(file: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run with the same settings; a new file gets the settings as its first line."""
    if file is None:
        return []
    if not file.exists():
        file.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        return []
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise UserError(f"{file} is not a file of finished rows. Give another one.") from None
    if not lines or lines[0] != settings:
        raise UserError(f"{file} is of a run with other settings. Give another file to --resume.")
    return lines[1:]


def add_row(file: Path | None, row: dict[str, Any]) -> None:
    """Keep a row, if there is a file for it."""
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
