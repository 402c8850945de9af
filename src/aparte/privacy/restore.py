"""Putting the original words back in place of their stand-ins, in text that comes in pieces.

Words have ends. A stand-in counts where no letter, digit or mark touches it, so *Clara* is left alone in
*declarations*; an ``s`` may follow, as in *Claras Haus*, and an apostrophe ends a word anyway. Scripts
without upper and lower case (Chinese, Arabic, Hindi, ...) are written without spaces, or with prefixes and
particles that touch the name, so there touching is no obstacle.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping


def is_word(char: str) -> bool:
    """Whether ``char`` makes one word with another such character next to it."""
    return (
        char.isdecimal()
        or char == "_"
        or char.lower() != char.upper()
        or unicodedata.category(char) in ("Mn", "Mc", "Me")
    )


def joined(left: str, right: str) -> bool:
    """Whether ``left`` and ``right``, written together, are inside of one word where they meet."""
    return bool(left and right) and is_word(left[-1]) and is_word(right[0])


def ends_here(text: str, end: int, final: bool = True) -> bool | None:
    """Whether a name that ends at ``end`` of ``text`` is complete there, but for an ``s``.

    None if that depends on characters to come, which there are unless ``final``.
    """
    last = text[end - 1]
    if not is_word(last):
        return True
    if end == len(text):
        return True if final else None
    if not is_word(text[end]):
        return True
    if text[end] in "sS" and last.lower() != last.upper():
        if end + 1 == len(text):
            return True if final else None
        return not is_word(text[end + 1])
    return False


class Restorer:
    """Restores one text. Pieces go in as they come; what comes out joins up to the restored text."""

    def __init__(self, originals: Mapping[str, str]) -> None:
        """``originals`` has the original by every spelling of a stand-in."""
        self._originals = dict(originals)
        self._by_start: dict[str, list[str]] = {}
        for form in sorted(self._originals, key=lambda form: (-len(form), form)):
            self._by_start.setdefault(form[0], []).append(form)
        self._held = ""
        self._before = ""  # the character before what is held
        #: Everything that came in, and everything that came out.
        self.given = ""
        self.text = ""

    def feed(self, piece: str) -> str:
        """The part of the text so far that is certain."""
        self.given += piece
        self._held += piece
        return self._advance(final=False)

    def finish(self) -> str:
        """The rest, when no more text comes."""
        return self._advance(final=True)

    def places(self, text: str) -> list[tuple[int, int]]:
        """Where something is replaced in a whole ``text``: beginnings and ends."""
        found, at = [], 0
        while at < len(text):
            form = self._form_at(text, at, final=True) or ""
            if form:
                found.append((at, at + len(form)))
            at += len(form) or 1
        return found

    def _advance(self, final: bool) -> str:
        text, at, out = self._held, 0, []
        while at < len(text):
            form = self._form_at(text, at, final)
            if form is None:
                break
            out.append(self._originals[form] if form else text[at])
            at += len(form) or 1
        if at:
            self._before, self._held = text[at - 1], text[at:]
        restored = "".join(out)
        self.text += restored
        return restored

    def _form_at(self, text: str, at: int, final: bool) -> str | None:
        """The longest stand-in at ``at``, empty if there is none; None if that is not certain yet."""
        forms = self._by_start.get(text[at])
        if forms is None or joined(text[at - 1] if at else self._before, text[at]):
            return ""
        for form in forms:
            if text.startswith(form, at):
                complete = ends_here(text, at + len(form), final)
                if complete is None:
                    return None
                if complete:
                    return form
            elif not final and form.startswith(text[at:]):
                return None
        return ""


def restore(text: str, originals: Mapping[str, str]) -> str:
    """The whole text at once."""
    restorer = Restorer(originals)
    return restorer.feed(text) + restorer.finish()
