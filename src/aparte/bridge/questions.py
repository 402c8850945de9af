"""How questions begin in the conversations that a model writes with itself.

Half of them begin with words of ours, for variety, and go on in the model's own; the others are its own
alone. With texts of the user's, half are instead about a passage that is quoted from these: models copy from
what they were given, and a bridge learns that from seeing it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aparte.bridge.openers import ABOUT_TEXT, OPENERS
from aparte.errors import UserError
from aparte.privacy.texts import read_text
from aparte.text.tokenizer import Codec

#: Tokens of a passage, drawn between these: whole paragraphs, the last one cut.
LEAST, MOST = 48, 400
#: Paragraphs with fewer characters are headings more often than text.
_LEAST_CHARACTERS = 120


@dataclass(frozen=True)
class Opening:
    """The first tokens of a question; ``whole`` if nothing is to follow."""

    tokens: tuple[int, ...] = ()
    whole: bool = False


class Questions:
    """Draws openings, by seed."""

    def __init__(self, codec: Codec, paragraphs: Sequence[str], seed: int) -> None:
        self._codec = codec
        self._paragraphs = paragraphs
        self._chance = random.Random(seed)

    def draw(self) -> Opening:
        """How the next question begins."""
        if self._paragraphs and self._chance.random() < 0.5:
            return self._about_text()
        if self._chance.random() < 0.5:
            return Opening()
        return Opening(tuple(self._codec.encode_piece(self._chance.choice(OPENERS))))

    def _about_text(self) -> Opening:
        before, after, whole = self._chance.choice(ABOUT_TEXT)
        most = self._chance.randint(LEAST, MOST)
        first = self._chance.randrange(len(self._paragraphs))
        passage: list[int] = []
        for paragraph in (*self._paragraphs[first:], *self._paragraphs[:first]):
            passage += self._codec.encode_piece(("\n" if passage else "") + paragraph)
            if len(passage) >= most:
                break
        pieces = (self._codec.encode_piece(before), passage[:most], self._codec.encode_piece(after))
        return Opening(tuple(token for piece in pieces for token in piece), whole)


def read_paragraphs(files: Sequence[Path]) -> list[str]:
    """Lines of ``files`` that are long enough to be text. Raises :class:`UserError` if there are none."""
    lines = (line.strip() for file in files for line in read_text(file).splitlines())
    found = [line for line in lines if len(line) >= _LEAST_CHARACTERS]
    if files and not found:
        raise UserError(
            f"There is no line of {_LEAST_CHARACTERS} characters or more in {files[0]}. Give plain text with "
            "a paragraph to a line."
        )
    return found
