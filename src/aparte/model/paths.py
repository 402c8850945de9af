"""Which rows each node of a step sees, for attention that walks there (:mod:`aparte.model.compiled`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from aparte.model.tree import Layout

#: Steps of more nodes, and of more nodes times rows, are work enough for the library's kernels, which read a
#: key once for all nodes. Up to :data:`FEW` nodes walking is always faster.
MOST_NODES = 8
MOST_WORK = 4096
FEW = 2


def worthwhile(layout: Layout) -> bool:
    """Whether a step's nodes had better walk."""
    nodes = len(layout.positions)
    return nodes <= FEW or (nodes <= MOST_NODES and nodes * layout.prefix <= MOST_WORK)


class Paths:
    """The nodes of a step see ``prefix`` rows, and of those behind ``counts[i]``, which are ``rows[i]``."""

    def __init__(self, layout: Layout) -> None:
        nodes = len(layout.positions)
        self.counts = layout.ancestors.sum(1)
        self.prefix, self.longest = layout.prefix, int(self.counts.max())
        self.rows = np.zeros((nodes, self.longest), np.int64)
        for node, seen in enumerate(layout.ancestors):
            self.rows[node, : self.counts[node]] = layout.prefix + np.flatnonzero(seen)
        #: What attention keeps here from layer to layer.
        self.walk: Any = None
