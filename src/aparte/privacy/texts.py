"""Texts to attack and to train attackers on: from files, or the sample that ships; split by text.

Assumptions: lines or paragraphs are texts of their own. No text is in both halves of a split, and none
twice, so an attacker never trains on what it is tested on. Every file is a *domain*: an attacker that trains
on one and is tested on another one shows what it is worth against text that it did not expect.
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
    """A text, the personal data in it as far as it is known, and its domain: the file that it came from."""

    text: str
    entities: tuple[Entity, ...] = ()
    domain: str = ""


def load_passages(file: Path) -> list[Passage]:
    """The texts of ``file``: lines of plain text, or JSON as a list (``.json``) or by line (``.jsonl``) of
    objects with ``full_text``, or with ``turns``.

    Such an object may have ``spans``, each with ``entity_type`` and ``entity_value``, as the data sets of
    presidio-research have them; ``turns`` are the questions of a conversation, as in Spec-Bench.
    """
    content, kind = read_text(file), file.suffix.lower()
    if kind not in (".json", ".jsonl"):
        lines = (line.strip() for line in content.splitlines())
        passages = [Passage(line, domain=file.name) for line in lines if len(line) >= LEAST_CHARACTERS]
    else:
        try:
            items = json.loads(content) if kind == ".json" else [json.loads(line) for line in _full(content)]
            passages = [passage for item in items for passage in _passages(item, file.name)]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{file} does not hold objects with full_text and spans, or with turns. Give plain text, or "
                "such objects: as a list in a .json file, or one a line in a .jsonl file."
            ) from None
    if len(passages) < 2:
        raise UserError(
            f"{file} holds fewer than two texts of {LEAST_CHARACTERS} characters. Give it more text."
        )
    return passages


def read_text(file: Path) -> str:
    """Raises :class:`UserError` for what is no file of UTF-8 text."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The text {file} cannot be read ({type(error).__name__}). Give a file of UTF-8 text."
        ) from None


def _full(content: str) -> list[str]:
    return [line for line in content.splitlines() if line.strip()]


def _passages(item: dict[str, Any], domain: str) -> list[Passage]:
    if "turns" in item:
        return [Passage(text, domain=domain) for text in map(str, item["turns"]) if text.strip()]
    spans = item.get("spans", [])
    entities = tuple(Entity(str(span["entity_type"]), str(span["entity_value"])) for span in spans)
    return [Passage(str(item["full_text"]), entities, domain)]


def split(passages: Iterable[Passage], victims: int, seed: int) -> tuple[list[Passage], list[Passage]]:
    """``victims`` texts to attack, as many of each domain, and the rest, for attackers.

    At most half of a domain is attacked. A text that comes several times counts once.
    """
    domains: dict[str, list[Passage]] = {}
    for passage in {passage.text: passage for passage in passages}.values():
        domains.setdefault(passage.domain, []).append(passage)
    draw, attacked, rest = random.Random(f"{seed} split"), [], []
    for number, mine in enumerate(domains.values()):
        draw.shuffle(mine)
        share = victims * (number + 1) // len(domains) - victims * number // len(domains)
        count = min(share, len(mine) // 2)
        attacked += mine[:count]
        rest += mine[count:]
    if len(domains) > 1:  # whoever takes the first few takes of every domain
        draw.shuffle(attacked)
        draw.shuffle(rest)
    return attacked, rest


def domains_of(passages: Iterable[Passage]) -> list[str]:
    """The names of their domains, in order."""
    return list(dict.fromkeys(passage.domain for passage in passages))


def cut_to_length(texts: Sequence[Sequence[int]], least: int, most: int) -> list[list[int]]:
    """Token texts of at least ``least`` tokens, each cut at ``most``."""
    return [list(text[:most]) for text in texts if len(text) >= least]


def windows(texts: Sequence[Sequence[int]], least: int, most: int) -> list[list[int]]:
    """All of the texts, in windows of ``most`` tokens, and then once more in windows that begin elsewhere.

    The states of a token depend on what precedes it, so the second round is other material for an attacker,
    if not as good as other text. Windows of fewer than ``least`` tokens are left out.
    """
    found = []
    for first in (0, most // 2):
        for text in texts:
            starts = range(first, len(text), most)
            found += [list(text[start : start + most]) for start in starts if len(text) - start >= least]
    return found
