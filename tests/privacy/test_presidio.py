"""Presidio as a finder, where it is installed; and what is said where it is not."""

from __future__ import annotations

import random
import sys

import pytest

from aparte.privacy.finders import find_patterns
from aparte.privacy.presidio import PresidioMissing, presidio_finder
from aparte.privacy.pseudonyms import Pseudonyms


def test_it_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(PresidioMissing, match=r"pip install 'aparte\[pseudonyms\]'"):
        presidio_finder()


def test_it_finds_people_that_nobody_listed() -> None:
    try:
        finder = presidio_finder()
    except PresidioMissing as missing:
        pytest.skip(str(missing))
    names = Pseudonyms((), (find_patterns, finder), random.Random(0))
    text = "My name is David Johnson and I live in Berlin. My phone number is 212-555-1234."
    hidden = names.hide(text)
    assert "Johnson" not in hidden
    assert "Berlin" not in hidden
    assert "212-555-1234" not in hidden
    restorer = names.restorer()
    assert restorer.feed(hidden) + restorer.finish() == text
