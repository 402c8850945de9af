"""How many nodes a step should carry, from what steps have cost so far.

In split mode a node costs its hidden state both ways and a row of compute on both sides. The budget adds
the next most probable node as long as that raises expected tokens per expected millisecond.

The network's share of a step follows the link, which may change from step to step, and grows with the bytes:
a line, soon forgotten. Compute follows the hardware, and is no line: kernels work through rows in blocks, so
that some nodes come nearly free and the next one costs much. It is a curve, remembered for longer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aparte.speculate.tree import DraftTree

#: Weight of a step after one more step: the estimate follows a changed link within some ten steps.
FADE = 0.9
#: The same for the curve of compute.
CURVE_FADE = 0.98
#: Until steps of different sizes were seen: one node costs about this, with the weight of some steps.
PRIOR_MS_PER_NODE = 1.0
PRIOR_WEIGHT = 20.0
#: The same for what is not compute, which is mostly transfer.
PRIOR_REST_MS_PER_NODE = 0.2
#: Sizes that the curve tells apart, 0 among them; larger steps count as the largest. The automatic budget
#: stays far below.
SIZES = 65
#: Steps that the line counts as, where sizes were seen.
LINE_WEIGHT = 0.5
#: Nodes of the first step, when nothing is known.
FIRST_NODES = 8
#: A tree to cut from has this many times the nodes that were kept of the last one, and some more, so that
#: the budget can rise; growing nodes that are never sent takes time too.
SPARE = 2.0
MORE = 4
#: How fast the size of the tree follows a budget that falls.
ROOM_FADE = 0.8
#: A step that takes this many times what was expected counts as this many times (a stall, not a trend).
STALL = 3.0


class StepCost:
    """Expected time of a step, ``fixed_ms + nodes * ms_per_node``, by least squares with fading memory."""

    def __init__(self, prior_ms_per_node: float = PRIOR_MS_PER_NODE, fade: float = FADE) -> None:
        self._prior = prior_ms_per_node
        self._fade = fade
        self._weight = 0.0
        self._nodes = 0.0
        self._ms = 0.0
        self._nodes_nodes = 0.0
        self._nodes_ms = 0.0

    @property
    def known(self) -> bool:
        """False until a step was seen."""
        return self._weight > 0

    @property
    def ms_per_node(self) -> float:
        """Slope, drawn towards the prior while steps were all of one size; never below zero."""
        if not self.known:
            return self._prior
        spread = self._nodes_nodes - self._nodes**2 / self._weight
        together = self._nodes_ms - self._nodes * self._ms / self._weight
        return max(0.0, (together + PRIOR_WEIGHT * self._prior) / (spread + PRIOR_WEIGHT))

    def expect_ms(self, nodes: float) -> float:
        """Expected time of a step of ``nodes`` nodes."""
        if not self.known:
            return nodes * self._prior
        mean_nodes, mean_ms = self._nodes / self._weight, self._ms / self._weight
        return max(0.1, mean_ms + self.ms_per_node * (nodes - mean_nodes))

    def observe(self, nodes: int, step_ms: float, most_ms: float | None = None) -> None:
        """A step of ``nodes`` nodes took ``step_ms``, which counts as ``most_ms`` at most."""
        if self.known:
            step_ms = min(step_ms, STALL * self.expect_ms(nodes) if most_ms is None else most_ms)
        self._weight = self._fade * self._weight + 1
        self._nodes = self._fade * self._nodes + nodes
        self._ms = self._fade * self._ms + step_ms
        self._nodes_nodes = self._fade * self._nodes_nodes + nodes * nodes
        self._nodes_ms = self._fade * self._nodes_ms + nodes * step_ms


class ComputeCurve:
    """Expected compute of a step by its nodes: a line, and where sizes were seen what they differ from it.

    It never falls. Everything fades alike, slowly. Where little was seen the line alone counts, so that noise
    between two neighbours does not bend the curve elsewhere.
    """

    def __init__(self) -> None:
        self._line = StepCost(PRIOR_MS_PER_NODE, CURVE_FADE)
        self._weights = np.zeros(SIZES)
        self._times = np.zeros(SIZES)
        self._curve = PRIOR_MS_PER_NODE * np.arange(SIZES)

    @property
    def known(self) -> bool:
        """False until a step was seen."""
        return self._line.known

    def expect_ms(self, nodes: int) -> float:
        """Expected time of a step of ``nodes`` nodes."""
        return float(self._curve[min(nodes, SIZES - 1)])

    def observe(self, nodes: int, compute_ms: float) -> None:
        """A step of ``nodes`` nodes took ``compute_ms``."""
        nodes = min(nodes, SIZES - 1)
        if self.known:
            compute_ms = min(compute_ms, STALL * max(1.0, self.expect_ms(nodes)))
        self._line.observe(nodes, compute_ms)
        self._weights *= CURVE_FADE
        self._times *= CURVE_FADE
        self._weights[nodes] += 1
        self._times[nodes] += compute_ms
        line = np.array([self._line.expect_ms(0), self._line.expect_ms(1)])
        straight = line[0] + (line[1] - line[0]) * np.arange(SIZES)
        differences = _NEAR @ (self._times - self._weights * straight) / (_NEAR @ self._weights + LINE_WEIGHT)
        self._curve = np.maximum.accumulate(np.maximum(0.0, straight + differences))


def _near() -> np.ndarray:
    """How much a step of one size tells about another: neighbours, the wider the larger the sizes are."""
    sizes = np.arange(SIZES, dtype=float)
    width = 0.4 + 0.04 * sizes
    return np.exp(-(((sizes[:, None] - sizes) / width[:, None]) ** 2))


_NEAR = _near()


class Budget(Protocol):
    """Decides how many nodes a step gets."""

    def room(self, most: int) -> int:
        """How many nodes to propose, ``most`` at most, for :meth:`trim` to choose from."""
        ...

    def trim(self, tree: DraftTree, pending: int = 1) -> DraftTree:
        """The best part of ``tree``, whose nodes must come most probable first; ``pending`` nodes go with it
        anyway."""
        ...

    def observe(
        self,
        nodes: int,
        step_ms: float,
        compute_ms: float = 0.0,
        *,
        cloud_ms: float = 0.0,
        tokens: int = 0,
        hoped: float = 0.0,
    ) -> None:
        """Learn what a step of ``nodes`` nodes took: ``compute_ms`` of it computing on both sides, and
        ``cloud_ms`` of that on the cloud. It committed ``tokens``, where ``hoped`` were expected."""
        ...


class Room:
    """How large a tree to propose: more than was kept of the last one, so that the budget can rise."""

    def __init__(self) -> None:
        self._nodes = float("inf")

    def within(self, most: int) -> int:
        """So many nodes, ``most`` at most."""
        return int(min(most, self._nodes))

    def kept(self, nodes: int) -> None:
        """So many were kept of the last tree."""
        before = 0.0 if self._nodes == float("inf") else self._nodes
        self._nodes = max(SPARE * nodes + MORE, ROOM_FADE * before)


class NodeBudget:
    """Cuts trees to the size that promises most tokens per millisecond."""

    def __init__(self) -> None:
        self.compute = ComputeCurve()
        self.rest = StepCost(PRIOR_REST_MS_PER_NODE)
        self._room = Room()

    def room(self, most: int) -> int:
        return self._room.within(most)

    def expect_ms(self, nodes: int) -> float:
        """Expected time of a step of ``nodes`` nodes."""
        return self.compute.expect_ms(nodes) + self.rest.expect_ms(nodes)

    def trim(self, tree: DraftTree, pending: int = 1) -> DraftTree:
        """Expected tokens of ``n`` nodes are one, the target's own, plus the sum of their probabilities."""
        if not self.rest.known:
            return tree.head(FIRST_NODES)
        best, best_rate, tokens = 0, 1.0 / self.expect_ms(pending), 1.0
        for count, probability in enumerate(tree.probabilities, start=1):
            tokens += probability
            rate = tokens / self.expect_ms(pending + count)
            if rate > best_rate:
                best, best_rate = count, rate
        self._room.kept(best)
        return tree.head(best)

    def observe(
        self,
        nodes: int,
        step_ms: float,
        compute_ms: float = 0.0,
        *,
        cloud_ms: float = 0.0,  # noqa: ARG002
        tokens: int = 0,  # noqa: ARG002
        hoped: float = 0.0,  # noqa: ARG002
    ) -> None:
        most_ms = STALL * self.expect_ms(nodes)
        self.compute.observe(nodes, compute_ms)
        self.rest.observe(nodes, max(0.0, step_ms - compute_ms), most_ms)
