from __future__ import annotations

import pytest

from aparte.speculate.accept import accept
from aparte.speculate.tree import DraftTree

#        1 -> 2 -> 3
#        1 -> 4
#        5
TREE = DraftTree((1, 2, 3, 4, 5), (-1, 0, 1, 0, -1), (0.5,) * 5)


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        ((9, 0, 0, 0, 0, 0), (), (9,)),  # nothing foreseen: the target's token alone
        ((1, 9, 0, 0, 0, 0), (0,), (1, 9)),
        ((1, 4, 0, 0, 8, 0), (0, 3), (1, 4, 8)),  # the second branch
        ((1, 2, 3, 7, 0, 0), (0, 1, 2), (1, 2, 3, 7)),  # all of a branch, and one on top
        ((5, 2, 3, 7, 0, 6), (4,), (5, 6)),
    ],
)
def test_the_targets_choices_are_followed(
    choices: tuple[int, ...], path: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    accepted = accept(TREE, choices)
    assert accepted.path == path
    assert accepted.tokens == tokens


def test_an_empty_tree_is_sequential_decoding() -> None:
    assert accept(DraftTree(), (7,)).tokens == (7,)
