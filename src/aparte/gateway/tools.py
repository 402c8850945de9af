"""Calls of tools in what a model writes: JSON in ``<tool_call>`` tags, as Qwen, Hermes and others do it."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A call of a function; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolCalls:
    """Takes calls out of a text that comes in pieces. What is no proper call stays text."""

    def __init__(self) -> None:
        self._held = ""
        self.count = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The text that is certainly outside of tags, and the calls that are complete."""
        self._held += text
        outside, calls = "", list[Call]()
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = _overlap(self._held)
                outside += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                return outside, calls
            outside += self._held[:start]
            end = self._held.find(CLOSE, start)
            if end < 0:
                self._held = self._held[start:]
                return outside, calls
            whole, self._held = self._held[start : end + len(CLOSE)], self._held[end + len(CLOSE) :]
            call = _parse(whole[len(OPEN) : -len(CLOSE)])
            if call is None:
                outside += whole
            else:
                calls.append(call)
                self.count += 1
                self._held = self._held.lstrip("\n")

    def finish(self) -> str:
        """What was held back: an unfinished call is text."""
        held, self._held = self._held, ""
        return held


def _parse(text: str) -> Call | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(f"call_{secrets.token_hex(12)}", call["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str) -> int:
    """Length of the longest end of ``text`` that a tag could begin with."""
    return next(
        (size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-size:])), 0
    )
