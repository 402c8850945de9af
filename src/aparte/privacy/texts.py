"""Texts to attack and to train attackers on: from files, or the sample that ships; split by text.

Assumptions: lines or paragraphs are texts of their own. No text is in both halves of a split, and none
twice, so an attacker never trains on what it is tested on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aparte.errors import UserError

#: Shorter lines are headings more often than text.
LEAST_CHARACTERS = 20


@dataclass(frozen=True)
class Entity:
    """A piece of personal data: its type, such as ``PERSON``, and the words themselves."""

    kind: str
    value: str


@dataclass(frozen=True)
class Passage:
    """A text, and the personal data in it as far as it is known."""

    text: str
    entities: tuple[Entity, ...] = ()


def load_passages(file: Path) -> list[Passage]:
    """The texts of ``file``: lines of plain text, or JSON as a list of objects with ``full_text``.

    Such an object may have ``spans``, each with ``entity_type`` and ``entity_value``, as the data sets of
    presidio-research have them.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The text {file} cannot be read ({type(error).__name__}). Give a file of UTF-8 text."
        ) from None
    if file.suffix.lower() != ".json":
        lines = (line.strip() for line in content.splitlines())
        passages = [Passage(line) for line in lines if len(line) >= LEAST_CHARACTERS]
    else:
        try:
            passages = [_passage(item) for item in json.loads(content)]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{file} is not a list of objects with full_text and spans. Give plain text, or such a list."
            ) from None
    if len(passages) < 2:
        raise UserError(
            f"{file} holds fewer than two texts of {LEAST_CHARACTERS} characters. Give it more text."
        )
    return passages


def _passage(item: dict[str, Any]) -> Passage:
    spans = item.get("spans", [])
    entities = tuple(Entity(str(span["entity_type"]), str(span["entity_value"])) for span in spans)
    return Passage(str(item["full_text"]), entities)


def split(passages: Iterable[Passage], victims: int, seed: int) -> tuple[list[Passage], list[Passage]]:
    """``victims`` texts to attack, at most a half of all, and the rest, for attackers.

    A text that comes several times counts once.
    """
    unique = list({passage.text: passage for passage in passages}.values())
    random.Random(f"{seed} split").shuffle(unique)
    count = min(victims, len(unique) // 2)
    return unique[:count], unique[count:]


def cut_to_length(texts: Sequence[Sequence[int]], least: int, most: int) -> list[list[int]]:
    """Token texts of at least ``least`` tokens, each cut at ``most``."""
    return [list(text[:most]) for text in texts if len(text) >= least]
