"""Draft trees: what a drafter proposes to hang below the pending token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aparte.distribution import Distribution

#: The parent of nodes that hang directly below the pending token.
BELOW_ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Proposed tokens; ``parents[i]`` is an earlier node or :data:`BELOW_ROOT`.

    ``probabilities[i]`` estimates the chance that node ``i`` lies on the path that will be accepted.
    ``drawn[i]`` is what node ``i`` was drawn from, for acceptance by rejection sampling, siblings in the
    order of drawing; it is empty where nodes are named, not drawn.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    drawn: tuple[Distribution, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, count: int) -> DraftTree:
        """The first ``count`` nodes; parents come before their children, so that is a tree too."""
        return DraftTree(
            self.tokens[:count], self.parents[:count], self.probabilities[:count], self.drawn[:count]
        )

    def children(self) -> dict[tuple[int, int], int]:
        """Node by (parent node, token)."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    def depths(self) -> list[int]:
        """Depth of each node below the pending token, from 1."""
        result: list[int] = []
        for parent in self.parents:
            result.append(1 if parent == BELOW_ROOT else result[parent] + 1)
        return result


class TreeBuilder:
    """Grows a draft tree; branches that share a prefix share its nodes."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._probabilities: list[float] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, probability: float) -> int:
        """Add ``token`` below node ``parent``, or find it there; the larger estimate counts."""
        node = self._children.get((parent, token))
        if node is not None:
            self._probabilities[node] = max(self._probabilities[node], probability)
            return node
        self._tokens.append(token)
        self._parents.append(parent)
        self._probabilities.append(probability)
        node = self._children[parent, token] = len(self._tokens) - 1
        return node

    def add_chain(self, tokens: Sequence[int], decay: float, room: int) -> int:
        """Add ``tokens`` as a chain below the root, at most ``room`` new nodes; return how many were new."""
        before, node, probability = len(self), BELOW_ROOT, 1.0
        for token in tokens:
            probability *= decay
            if (node, token) not in self._children and len(self) - before >= room:
                break
            node = self.add(node, token, probability)
        return len(self) - before

    def build(self) -> DraftTree:
        """The tree so far."""
        return DraftTree(tuple(self._tokens), tuple(self._parents), tuple(self._probabilities))


def sanitize(tree: DraftTree, *, vocab_size: int, max_nodes: int, max_depth: int) -> DraftTree:
    """The usable part of what a drafter returned.

    A broken drafter may waste a round trip, never change the text: token ids outside the vocabulary,
    parents that do not come before their node, twins, nodes too deep and nodes over budget are dropped
    together with what hangs below them; estimates that are not probabilities become 0. If there
    are distributions, but not one per node, nothing is usable.
    """
    if tree.drawn and len(tree.drawn) != len(tree.tokens):
        return DraftTree()
    builder = TreeBuilder()
    drawn: list[Distribution] = []
    place: dict[int, int] = {BELOW_ROOT: BELOW_ROOT}  # node of the input -> node of the result
    depth: dict[int, int] = {BELOW_ROOT: 0}
    rows = zip(tree.tokens, tree.parents, tree.probabilities, strict=False)
    for node, (token, parent, probability) in enumerate(rows):
        if type(token) is not int or not 0 <= token < vocab_size or parent not in place:
            continue
        if depth[parent] >= max_depth or len(builder) >= max_nodes:
            continue
        usable = isinstance(probability, float) and math.isfinite(probability) and 0 <= probability <= 1
        before = len(builder)
        place[node] = builder.add(place[parent], token, probability if usable else 0.0)
        depth[node] = depth[parent] + 1
        if tree.drawn and len(builder) > before:
            drawn.append(tree.drawn[node])
    return replace(builder.build(), drawn=tuple(drawn))
