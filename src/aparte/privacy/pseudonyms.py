"""Pseudonyms: stand-ins for names and numbers before a text becomes tokens, the originals in the answer.

The promise, which every text is checked for before it is used: what is hidden and restored is the text that
was given, in Unicode's composed form (NFC). So no stand-in occurs in the text by chance, none is part of
another, and a text that holds one already gets a stand-in for that.

One object per conversation: an original has the same stand-in throughout. It replaces what it finds and
nothing else; whether that is all that tells who somebody is, no program knows.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from aparte.errors import UserError
from aparte.privacy.finders import Finder, Listed, Names, Span, find_patterns, merged
from aparte.privacy.restore import Restorer, ends_here, joined, restore
from aparte.privacy.standins import invent

#: Draws of one stand-in, and of all new ones of a text, before it is given up.
TRIES = 300
WHOLE_TRIES = 8
#: Around a stand-in where letters touch it, such as a Latin one for a name in a text without spaces.
OPEN, CLOSE = "⟦", "⟧"


class Pseudonyms:
    """What stands for what in one conversation."""

    def __init__(
        self,
        listed: Sequence[Listed] = (),
        finders: Sequence[Finder] = (find_patterns,),
        draw: random.Random | None = None,
    ) -> None:
        """``finders`` look for more than is listed. ``draw`` is for tests.

        Raises :class:`UserError` for listed stand-ins that could be mistaken for each other.
        """
        self._draw = random.SystemRandom() if draw is None else draw
        self._finders: list[Finder] = [Names(one.name for one in listed), *finders]
        self._names = {one.name.casefold(): one.name for one in listed}
        self._reserved = {one.name: one.stand_in for one in listed if one.stand_in is not None}
        _check_reserved(list(self._reserved.values()))
        self._stand_ins: dict[str, str] = {}  # by the original as it is spelled
        self._originals: dict[str, str] = {}  # by the stand-in as it may be spelled
        self._met: dict[str, None] = {}  # originals that were in a text
        self._seen = ""  # all text so far, in lower case
        self._count = 0

    @property
    def count(self) -> int:
        """How many different names and numbers were replaced so far."""
        return self._count

    def hide(self, text: str) -> str:
        """``text`` with stand-ins.

        Raises :class:`UserError` if no stand-ins can be found that are certain to be told apart.
        """
        text = _nfc(text)
        before = self._stand_ins, self._originals, self._met, self._count
        for _ in range(WHOLE_TRIES):
            self._stand_ins, self._originals, self._met = dict(before[0]), dict(before[1]), dict(before[2])
            self._count = before[3]
            hidden = self._hidden(text)
            if restore(hidden, self._originals) == text:
                self._seen += f"\n{text}\n{hidden}".lower()
                return hidden
        self._stand_ins, self._originals, self._met, self._count = before
        raise UserError(
            "No stand-ins can be found for this text that are certain to be told from the rest of it. If the "
            "list of names has stand-ins of your own, choose rarer words."
        )

    def restorer(self, spell: Callable[[str], str] = str) -> Restorer:
        """For one answer, which may come in pieces. ``spell`` is how originals are written there."""
        return Restorer({stand_in: spell(original) for stand_in, original in self._originals.items()})

    def answered(self, text: str) -> None:
        """The model wrote ``text``; no stand-in yet to come will be a word of it."""
        self._seen += f"\n{text}".lower()

    # -- one text ---------------------------------------------------------------------------------

    def _hidden(self, text: str) -> str:
        spans = self._spans(text)
        while True:  # what is replaced in one place is replaced in all
            for span in sorted(spans, key=lambda span: span.start - span.end):  # whole names, then parts
                self._meet(text[span.start : span.end], span.kind, text)
            before, spans = spans, self._spans(text)
            if spans == before:
                return self._replaced(text, spans)

    def _spans(self, text: str) -> list[Span]:
        found = [span for finder in self._finders for span in finder(text)]
        # What was replaced before, and stand-ins that the text brings along.
        reserved = [cased(one) for one in self._reserved.values() for cased in _CASINGS]
        for words in (list(self._met), list(self._originals), reserved):  # singly, so that they may overlap
            found += [Span(*place, "name") for place in _places(text, words)]
        return merged(found)

    def _replaced(self, text: str, spans: Sequence[Span]) -> str:
        parts: list[str] = []
        at, before = 0, ""
        for number, span in enumerate(spans):
            parts.append(text[at : span.start])
            before = text[span.start - 1] if span.start > at else before
            stand_in = self._stand_ins[text[span.start : span.end]]
            after = text[span.end : span.end + 2]
            if number + 1 < len(spans) and spans[number + 1].start < span.end + 2:
                after = text[span.end : spans[number + 1].start] + "x"  # or whatever comes in its place
            if not _fits(before, stand_in, after):
                apart = f"{OPEN}{stand_in}{CLOSE}"
                self._originals[apart] = self._originals[stand_in]
                stand_in = apart
            parts.append(stand_in)
            at, before = span.end, stand_in[-1]
        return "".join((*parts, text[at:]))

    # -- stand-ins --------------------------------------------------------------------------------

    def _meet(self, original: str, kind: str, text: str) -> None:
        """Make sure that there is a stand-in for what stands in ``text`` like this."""
        self._met[original] = None
        if original in self._stand_ins:
            return
        # A listed name in lower case or over two lines goes with the name; any other spelling stands alone.
        plain = " ".join(original.split())
        name = self._names.get(plain.casefold(), plain)
        if name not in self._stand_ins:
            self._add(name, kind, text)
        stand_in = self._stand_ins[name]
        if original == name.lower():
            self._enter(original, stand_in.lower())
        elif plain == name and len(plain.split()) == len(stand_in.split()):
            words = iter(stand_in.split())
            self._enter(original, re.sub(r"\S+", lambda _: next(words), original))
        if original not in self._stand_ins:
            self._add(original, kind, text)

    def _add(self, original: str, kind: str, text: str) -> None:
        """Find a stand-in, and enter it, its capitals, and its words as those of the original."""
        self._count += 1
        stand_in = self._reserved.get(original)
        if stand_in is None or stand_in in self._originals:
            stand_in = self._invented(original, kind, text)
        pairs = [(original, stand_in)]
        old, new = original.split(), stand_in.split()
        if kind == "name" and len(old) > 1 and len(new) > 1:
            pairs += [(old[0], new[0]), (old[-1], new[-1])]
        for one, other in pairs:
            for cased in _CASINGS:
                self._enter(cased(one), cased(other), both=one == original or one not in self._reserved)

    def _enter(self, original: str, stand_in: str, both: bool = True) -> None:
        """These two belong together, unless the stand-in is taken; not ``both`` is for restoring only."""
        if stand_in not in self._originals:
            self._originals[stand_in] = original
            self._originals.setdefault(unicodedata.normalize("NFD", stand_in), original)
            if both:
                self._stand_ins.setdefault(original, stand_in)

    def _invented(self, original: str, kind: str, text: str) -> str:
        taken = "\n".join((self._seen, text.lower(), *map(str.lower, self._names.values())))
        others = [form.lower() for form in (*self._originals, *self._reserved.values())]
        restorer = Restorer(dict.fromkeys(others, ""))
        for attempt in range(TRIES):
            stand_in = invent(kind, original, self._draw, attempt)
            lower = stand_in.lower()
            if any(word in taken for word in (lower, *(lower.split() if kind == "name" else ()))):
                continue
            if not restorer.places(lower) and not _places("\n".join(others), [lower]):
                return stand_in
        raise UserError(
            "There are no stand-ins left for this conversation. Start a new one, or list fewer names."
        )


_CASINGS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.upper,
    lambda text: text[:1].upper() + text[1:],
)


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _places(text: str, words: Iterable[str]) -> list[tuple[int, int]]:
    return Restorer(dict.fromkeys(words, "")).places(text)


def _fits(before: str, stand_in: str, after: str) -> bool:
    """Whether a stand-in will be recognised between these characters."""
    if before == OPEN or joined(before, stand_in):
        return False
    return bool(ends_here(stand_in + after, len(stand_in)))


def _check_reserved(stand_ins: Sequence[str]) -> None:
    lower = [stand_in.lower() for stand_in in stand_ins]
    for index, one in enumerate(lower):
        for other in lower[:index]:
            if set(one.split()) & set(other.split()) or _places(one, [other]) or _places(other, [one]):
                raise UserError(
                    "Two stand-ins in the list of names share a word. Choose such that none is part of "
                    "another."
                )
