"""Streaming text out of tokens: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What tokenizers print for bytes that do not form a character (yet).
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns tokens into text pieces that join up to the text of all tokens.

    A token may be part of a character, and may be spelled differently after its predecessor; so each
    token is decoded together with those before it that have not settled.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here, so that spacing comes out right ...
        self._emitted = 0  # ... and what lies before this index has been given out

    def feed(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._context : self._emitted])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(INCOMPLETE) or len(text) <= len(known):
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return text[len(known) :]

    def finish(self) -> str:
        """What is left: an unfinished character comes out as a replacement character."""
        known = self._decode(self._tokens[self._context : self._emitted])
        text = self._decode(self._tokens[self._context :])
        self._context = self._emitted = len(self._tokens)
        return text[len(known) :]


class StopMatcher:
    """Lets text through up to the first stop string, holding back what might become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The part of the text so far that is certain not to belong to a stop string."""
        if self.stopped:
            return ""
        buffer = self._held + text
        found = [index for stop in self._stops if (index := buffer.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return buffer[: min(found)]
        hold = max((_overlap(buffer, stop) for stop in self._stops), default=0)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that a stop string could begin with."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )
