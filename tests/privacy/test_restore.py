"""Stand-ins are found as words, whole or in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aparte.privacy.restore import Restorer, ends_here, joined, restore

ORIGINALS = {
    "Clara": "Anna",
    "CLARA": "ANNA",
    "Clara Berg": "Anna Smith",
    "48213": "90210",
    "⟦Clara⟧": "Anna",
    "Zoë": "Eve",
}


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("Clara", "Anna"),
        ("Dear Clara, hello", "Dear Anna, hello"),
        ("(Clara)", "(Anna)"),
        ('"Clara" said', '"Anna" said'),
        ("Clara's and CLARA'S", "Anna's and ANNA'S"),
        ("Claras Haus, Claras", "Annas Haus, Annas"),
        ("Clarass, Clarasx", "Clarass, Clarasx"),
        ("Clara Berg's", "Anna Smith's"),
        ("Clara Bergen", "Anna Bergen"),
        ("Clara  Berg", "Anna  Berg"),
        ("declara Claraville xClara Clarax", "declara Claraville xClara Clarax"),
        ("Clara_1 and Clara1", "Clara_1 and Clara1"),
        ("Clara\u0301", "Clara\u0301"),
        ("我叫Clara。Clara和", "我叫Anna。Anna和"),
        ("code 48213, 482135, 148213, x48213", "code 90210, 482135, 148213, x48213"),
        ("abc⟦Clara⟧def", "abcAnnadef"),
        ("⟦⟦Clara⟧⟧", "⟦Anna⟧"),
        ("Zoë Zoe Zoëy", "Eve Zoe Zoëy"),
        ("clara", "clara"),
        ("", ""),
    ],
)
def test_what_counts_as_a_stand_in(given_text: str, expected: str) -> None:
    assert restore(given_text, ORIGINALS) == expected
    restorer = Restorer(ORIGINALS)
    assert "".join(map(restorer.feed, given_text)) + restorer.finish() == expected
    assert (restorer.given, restorer.text) == (given_text, expected)


@given(
    st.lists(st.sampled_from([*ORIGINALS, "Cl", "ara", " ", "s", "'", "x", "王", "\u0301", "⟦", "4", "."]))
)
@settings(max_examples=150, deadline=None)
def test_pieces_join_up_to_the_whole(parts: list[str]) -> None:
    restorer = Restorer(ORIGINALS)
    assert "".join(map(restorer.feed, parts)) + restorer.finish() == restore("".join(parts), ORIGINALS)


def test_nothing_is_held_back_longer_than_needed() -> None:
    restorer = Restorer(ORIGINALS)
    assert restorer.feed("Hello Cl") == "Hello "
    assert restorer.feed("ar") == ""
    assert restorer.feed("k, ") == "Clark, "
    assert restorer.feed("Clara") == ""
    assert restorer.feed(" ") == ""  # Berg may follow
    assert restorer.feed("B") == ""
    assert restorer.feed("a") == "Anna Ba"
    assert restorer.finish() == ""


def test_an_empty_mapping_lets_everything_through_at_once() -> None:
    restorer = Restorer({})
    assert restorer.feed("any text Cl") == "any text Cl"
    assert restorer.finish() == ""


def test_places_are_those_that_are_replaced() -> None:
    text = "Clara and Clara Berg in Claraville"
    assert [text[start:end] for start, end in Restorer(ORIGINALS).places(text)] == ["Clara", "Clara Berg"]


def test_words_join_where_letters_meet() -> None:
    assert joined("ab", "cd")
    assert joined("a", "1")
    assert joined("e", "\u0301")
    assert not joined("a", " ")
    assert not joined("a", "王")
    assert not joined("", "a")
    assert ends_here("Clara", 5, final=False) is None
    assert ends_here("王", 1, final=False) is True
