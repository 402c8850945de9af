"""The audit's plots tell their settings apart."""

from __future__ import annotations

from aparte.privacy.plots import STYLES, _cycle


def test_no_two_lines_look_the_same() -> None:
    pairs = _cycle(3 * len(STYLES))
    assert len(set(pairs)) == len(pairs)
    assert pairs[: len(STYLES)] == list(STYLES)
