"""Acceptance: which path of a draft tree the target agrees with. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aparte.speculate.tree import BELOW_ROOT, DraftTree


@dataclass(frozen=True)
class Accepted:
    """``path`` are the accepted draft nodes in order; ``tokens`` their tokens and the target's own next one.

    ``len(tokens) == len(path) + 1``: the tokens committed by this round trip.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept(tree: DraftTree, choices: Sequence[int]) -> Accepted:
    """Follow the target's choices through the tree as far as they were foreseen.

    ``choices[0]`` is the target's token after the pending token, ``choices[1 + i]`` after node ``i``.
    With choices that depend on logits and position only (greedy, or seeded Gumbel-max) the result is,
    token for token, what sequential decoding writes.
    """
    children = tree.children()
    node = BELOW_ROOT
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = choices[1 + node]
        tokens.append(token)
        child = children.get((node, token))
        if child is None:
            return Accepted(tuple(path), tuple(tokens))
        path.append(child)
        node = child
