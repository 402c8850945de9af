"""The automaton against the definition: what followed the longest suffix that occurred before."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aparte.speculate.suffixes import ROOT, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def grown(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def followers(text: list[int], words: list[int]) -> Counter[int]:
    size = len(words)
    return Counter(text[i + size] for i in range(len(text) - size) if text[i : i + size] == words)


def occurrences(text: list[int], words: list[int]) -> int:
    return sum(text[i : i + len(words)] == words for i in range(len(text) - len(words) + 1))


@given(TEXTS)
def test_the_longest_repeat_and_what_followed_it(text: list[int]) -> None:
    automaton = grown(text)
    longest = next((size for size in range(len(text) - 1, 0, -1) if occurrences(text, text[-size:]) > 1), 0)
    state = automaton.longest_repeat
    assert automaton.length(state) == longest
    while state not in (ROOT, -1):
        words = text[len(text) - automaton.length(state) :]
        assert automaton.followed(state) == followers(text, words)
        state = automaton.link(state)


@given(TEXTS, st.lists(st.integers(0, 4), max_size=10))
def test_stepping_keeps_the_longest_match(text: list[int], more: list[int]) -> None:
    automaton = grown(text)
    state, length, walked = ROOT, 0, []
    for token in more:
        state, length = automaton.step(state, length, token)
        walked.append(token)
        expected = next((size for size in range(len(walked), 0, -1) if occurrences(text, walked[-size:])), 0)
        assert length == expected
        if length:
            assert automaton.followed(state) == followers(text, walked[-length:])


def test_of_equally_frequent_followers_the_newest_is_last() -> None:
    automaton = grown([1, 2, 1, 3, 1])
    assert list(automaton.followed(automaton.longest_repeat)) == [2, 3]
    automaton = grown([1, 3, 1, 2, 1, 3, 1, 2, 1, 3, 1])
    assert list(automaton.followed(automaton.link(automaton.longest_repeat)))[-1] in (2, 3)
