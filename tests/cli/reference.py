"""What docs/cli.md says about a command's JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def undocumented(command: str, report: Any, *, free: tuple[str, ...] = ()) -> set[str]:
    """Fields of ``report`` that the command's section does not name.

    Below the keys in ``free`` are names of things, such as limits, and not of fields.
    """
    section = PAGE.read_text(encoding="utf-8").split(f"\n## `aparte {command}`\n")[1].split("\n## ")[0]
    section = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)
    return set(_fields(report, free)) - set(re.findall(r"`([^`]+)`", section))


def _fields(value: Any, free: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _fields(item, free)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key in free and isinstance(item, dict):
                for inner in item.values():
                    yield from _fields(inner, free)
            else:
                yield from _fields(item, free)
