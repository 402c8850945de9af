"""What is to be replaced in a text: a list of names, and patterns for what has digits or an @ in it.

The patterns err on the side of replacing. Any five digits that belong together are a number: accounts,
telephones, postcodes, identity cards, and also the population of a town.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aparte.errors import UserError
from aparte.privacy.restore import ends_here, joined


@dataclass(frozen=True)
class Span:
    """A place in a text, and what is there: name, place, email, iban, date, number."""

    start: int
    end: int
    kind: str


Finder = Callable[[str], Iterable[Span]]


@dataclass(frozen=True)
class Listed:
    """A line of the user's list."""

    name: str
    stand_in: str | None = None


#: In two languages; English ones come first where both spell a month alike.
MONTHS = tuple(
    tuple(names.split())
    for names in (
        "January February March April May June July August September October November December",
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    )
)
_MONTH = "|".join(dict.fromkeys(month for names in MONTHS for month in names))
_PATTERNS = (
    ("email", re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")),
    ("iban", re.compile(r"\b[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,4})?\b")),
    ("date", re.compile(r"\b\d{4}-\d{1,2}-\d{1,2}\b|\b\d{1,2}([./-])\d{1,2}\1(?:\d{4}|\d{2})\b")),
    ("date", re.compile(rf"\b\d{{1,2}}(?:st|nd|rd|th|\.)? (?:of )?(?:{_MONTH}),? \d{{4}}\b")),
    ("date", re.compile(rf"\b(?:{_MONTH}) \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}\b")),
    # Five digits in a word, and five with one separator at most, or a bracket and a space, between any two.
    ("number", re.compile(r"\b(?=(?:[^\W\d_]*\d){5})[^\W_]{5,}\b")),
    ("number", re.compile(r"(?:\+|\()?[^\W\d_]{0,4}\d(?:(?:[ .,/:()-]|\) |\(0\) ?| \()?\d){4,}[^\W_]{0,4}")),
)


def find_patterns(text: str) -> Iterable[Span]:
    """Addresses of e-mail, IBANs, full dates, and numbers of five digits or more."""
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            yield Span(*_whole(text, *match.span()), kind)


def _whole(text: str, start: int, end: int) -> tuple[int, int]:
    """The place, widened to whole words: no part of an identifier is left standing."""
    while start and joined(text[start - 1], text[start]):
        start -= 1
    while end < len(text) and joined(text[end - 1], text[end]):
        end += 1
    return start, end


class Names:
    """Finds names wherever they stand as words, in any casing, also before an ``s``."""

    def __init__(self, names: Iterable[str] = (), kind: str = "name") -> None:
        self._kind = kind
        self._patterns = [_pattern(name) for name in names]

    def __call__(self, text: str) -> Iterable[Span]:
        for pattern in self._patterns:
            for match in pattern.finditer(text):
                start, end = match.span(1)
                if (start and joined(text[start - 1], text[start])) or not ends_here(text, end):
                    continue
                yield Span(start, end, self._kind)


def _pattern(name: str) -> re.Pattern[str]:
    """Any casing, also where it changes the length (ß, SS), any space between words, any apostrophe."""
    forms = dict.fromkeys((name, name.upper(), name.lower()))
    spelled = "|".join(r"\s+".join(map(re.escape, form.split())) for form in forms)
    spelled = re.sub("['\u2019]", "['\u2019]", spelled)
    return re.compile(f"(?=({spelled}))", re.IGNORECASE)  # a lookahead, so that matches may overlap


def merged(spans: Sequence[Span]) -> list[Span]:
    """Places that do not overlap, in order. Of those that do, one is made, of the longest one's kind."""
    result: list[tuple[Span, int]] = []  # with the length of the one that gave the kind
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        length = span.end - span.start
        if result and span.start < result[-1][0].end:
            last, longest = result[-1]
            kind = span.kind if length > longest else last.kind
            result[-1] = Span(last.start, max(last.end, span.end), kind), max(length, longest)
        elif length:
            result.append((span, length))
    return [span for span, _ in result]


def read_names(file: Path) -> tuple[Listed, ...]:
    """The user's list: a name per line, or ``name = stand-in``. Empty lines and those with # do not count.

    Raises :class:`UserError`, without quoting it, for a line that is neither.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The list of names {file} cannot be read ({type(error).__name__}). Give a file of UTF-8 text."
        ) from None
    found: dict[str, Listed] = {}
    for number, line in enumerate(lines, start=1):
        text = unicodedata.normalize("NFC", line).strip()
        if not text or text.startswith("#"):
            continue
        name, equals, stand_in = (" ".join(part.split()) for part in text.partition("="))
        if not name or (equals and not stand_in):
            raise UserError(f"Line {number} of {file} is not a name, nor of the form name = stand-in.")
        if name.casefold() in found:
            raise UserError(f"Line {number} of {file} has a name for the second time. Leave one of them out.")
        found[name.casefold()] = Listed(name, stand_in or None)
    return tuple(found.values())
