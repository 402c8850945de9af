"""A suffix automaton over tokens, grown one token at a time, with counts of what followed.

Every string that occurs in the text is a path from the root. States group strings with the same places
of occurrence; the suffix link of a state leads to the longest suffix that occurs in more places.
"""

from __future__ import annotations

ROOT = 0


class SuffixAutomaton:
    """Answers: what is the longest suffix of a text seen before, and which tokens followed it how often."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._followed: list[dict[int, int]] = [{}]
        self._last = ROOT

    def append(self, token: int) -> None:
        """Add one token to the text."""
        # Every suffix of the text so far was followed by this token once more.
        state = self._last
        while state != -1:
            counts = self._followed[state]
            counts[token] = counts.pop(token, 0) + 1  # the newest goes last
            state = self._link[state]

        current = self._new({}, 0, self._length[self._last] + 1, {})
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state != -1:
            target = self._next[state][token]
            if self._length[target] != self._length[state] + 1:
                target = self._split(state, token, target)
            self._link[current] = target
        self._last = current

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the shorter strings of ``target`` a state of their own: they now occur in one place more."""
        clone = self._new(
            dict(self._next[target]),
            self._link[target],
            self._length[state] + 1,
            dict(self._followed[target]),
        )
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        self._link[target] = clone
        return clone

    def _new(self, following: dict[int, int], link: int, length: int, followed: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._followed.append(followed)
        return len(self._next) - 1

    @property
    def longest_repeat(self) -> int:
        """State of the longest suffix of the text that occurs earlier in it too."""
        return max(ROOT, self._link[self._last])

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (matched string + ``token``) that occurs in the text, and its length.

        ``state`` and ``length`` describe the matched string.
        """
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token in self._next[state]:
            return self._next[state][token], length + 1
        return ROOT, 0

    def length(self, state: int) -> int:
        """Length of the longest string of a state."""
        return self._length[state]

    def link(self, state: int) -> int:
        """State of the longest suffix with more occurrences; -1 for the root."""
        return self._link[state]

    def followed(self, state: int) -> dict[int, int]:
        """How often each token followed the strings of ``state``."""
        return self._followed[state]
