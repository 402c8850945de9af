"""Text leaves in whole characters, and stop strings never leave at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aparte.text.stream import Detokenizer, StopMatcher
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@given(st.text(max_size=40))
def test_pieces_join_to_the_text_and_hold_whole_characters(text: str) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    stream = Detokenizer(decode)
    pieces = [stream.feed(token) for token in tokens]
    pieces.append(stream.finish())
    assert "".join(pieces) == decode(tokens)
    if "\ufffd" not in decode(tokens):
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text_are_not_lost(tokens: list[int]) -> None:
    stream = Detokenizer(decode)
    pieces = [stream.feed(token) for token in tokens] + [stream.finish()]
    for piece in pieces:
        piece.encode("utf-8")
    assert "".join(pieces) == decode(tokens)


def test_a_character_of_four_tokens_comes_out_once_it_is_whole() -> None:
    tokens = TOKENIZER("🙂", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 4
    stream = Detokenizer(decode)
    assert [stream.feed(token) for token in tokens] == ["", "", "", "🙂"]


def test_an_unfinished_character_at_the_end_is_marked() -> None:
    stream = Detokenizer(decode)
    for token in TOKENIZER("a🙂", add_special_tokens=False)["input_ids"][:-1]:
        stream.feed(token)
    assert stream.finish() == "\ufffd"


TEXTS = st.text(alphabet="ab\n#", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n#", min_size=1, max_size=4), min_size=1, max_size=3)


@given(TEXTS, STOPS, st.integers(1, 5))
def test_text_ends_at_the_first_stop_string(text: str, stops: list[str], size: int) -> None:
    """However the text is cut into pieces."""
    matcher = StopMatcher(stops)
    out = ""
    for start in range(0, len(text), size):
        out += matcher.feed(text[start : start + size])
        if matcher.stopped:
            break
    out += matcher.finish()
    places = [text.index(stop) for stop in stops if stop in text]
    if not places:
        assert out == text
        assert not matcher.stopped
    else:
        assert matcher.stopped
        assert out == text[: len(out)]
        assert not any(stop in out for stop in stops)
        assert any(text.startswith(stop, len(out)) for stop in stops)


@pytest.mark.parametrize("stop", ["</end>", "\n\n"])
def test_nothing_of_a_stop_string_leaks(stop: str) -> None:
    matcher = StopMatcher([stop])
    assert "".join(matcher.feed(char) for char in "text" + stop + "more") == "text"


def test_what_might_be_a_stop_string_comes_out_when_it_is_not() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.feed("xab") == "x"
    assert matcher.feed("d") == "abd"
    assert matcher.feed("ab") == ""
    assert matcher.finish() == "ab"
