"""How many nodes a step should carry, from what steps have cost so far.

In split mode a node costs its hidden state both ways and a row of compute on both sides. The budget adds
the next most probable node as long as that raises expected tokens per expected millisecond.

The network's share of a step follows the link, which may change from step to step, and grows with the bytes:
a line, soon forgotten. Compute follows the hardware, and is no line: kernels work through rows in blocks, so
that some nodes come nearly free and the next one costs much. It is a curve, remembered for longer.
"""

from __future__ import annotations

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
#: Where the curve may bend, in nodes per step.
KNOTS = np.array([*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 128, 256], dtype=float)
#: Weight, in steps, of the curve being straight and of its slope being the prior one, between two knots.
STRAIGHT = 0.05
SLOPED = 0.03
#: Nodes of the first step, when nothing is known.
FIRST_NODES = 8
#: A step that takes this many times what was expected counts as this many times (a stall, not a trend).
STALL = 3.0


class StepCost:
    """Expected time of a step, ``fixed_ms + nodes * ms_per_node``, by least squares with fading memory."""

    def __init__(self, prior_ms_per_node: float = PRIOR_MS_PER_NODE) -> None:
        self._prior = prior_ms_per_node
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
        self._weight = FADE * self._weight + 1
        self._nodes = FADE * self._nodes + nodes
        self._ms = FADE * self._ms + step_ms
        self._nodes_nodes = FADE * self._nodes_nodes + nodes * nodes
        self._nodes_ms = FADE * self._nodes_ms + nodes * step_ms


class ComputeCurve:
    """Expected compute of a step by its nodes: straight between :data:`KNOTS`, and never falling.

    The heights of the knots are a least-squares fit with fading memory. Where no steps were seen, the curve
    goes on in the direction that it has.
    """

    def __init__(self) -> None:
        self._normal = np.zeros((len(KNOTS), len(KNOTS)))
        self._right = np.zeros(len(KNOTS))
        self._heights: np.ndarray | None = None

    @property
    def known(self) -> bool:
        """False until a step was seen."""
        return self._heights is not None

    def expect_ms(self, nodes: float) -> float:
        """Expected time of a step of ``nodes`` nodes."""
        if self._heights is None:
            return nodes * PRIOR_MS_PER_NODE
        return float(np.interp(nodes, KNOTS, self._heights))

    def observe(self, nodes: int, compute_ms: float) -> None:
        """A step of ``nodes`` nodes took ``compute_ms``."""
        if self.known:
            compute_ms = min(compute_ms, STALL * max(1.0, self.expect_ms(nodes)))
        row = _hats(nodes)
        self._normal = CURVE_FADE * self._normal + np.outer(row, row)
        self._right = CURVE_FADE * self._right + row * compute_ms
        heights = np.linalg.solve(self._normal + _SHAPE, self._right + _SHAPE_RIGHT)
        self._heights = np.maximum(0.0, np.maximum.accumulate(heights))


def _hats(nodes: float) -> np.ndarray:
    """How much each knot counts at ``nodes``; together 1."""
    at = min(max(nodes, KNOTS[0]), KNOTS[-1])
    right = int(np.clip(np.searchsorted(KNOTS, at), 1, len(KNOTS) - 1))
    share = (at - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1])
    row = np.zeros(len(KNOTS))
    row[right - 1], row[right] = 1 - share, share
    return row


def _shape() -> tuple[np.ndarray, np.ndarray]:
    """The normal equations of "straight, and as steep as the prior", weighed as observations."""
    normal, right = np.zeros((len(KNOTS), len(KNOTS))), np.zeros(len(KNOTS))
    gaps = np.diff(KNOTS)
    for index, gap in enumerate(gaps):
        rise = np.zeros(len(KNOTS))
        rise[index : index + 2] = -1, 1
        normal += SLOPED * np.outer(rise, rise)
        right += SLOPED * rise * gap * PRIOR_MS_PER_NODE
        if index:
            before = np.zeros(len(KNOTS))
            before[index - 1 : index + 1] = -1, 1
            bend = rise / gap - before / gaps[index - 1]
            # In milliseconds over the shorter side: how far the curve leaves the straight line there.
            bend *= min(gap, gaps[index - 1])
            normal += STRAIGHT * np.outer(bend, bend)
    return normal, right


_SHAPE, _SHAPE_RIGHT = _shape()


class NodeBudget:
    """Cuts trees to the size that promises most tokens per millisecond."""

    def __init__(self) -> None:
        self.compute = ComputeCurve()
        self.rest = StepCost(PRIOR_REST_MS_PER_NODE)

    def expect_ms(self, nodes: float) -> float:
        """Expected time of a step of ``nodes`` nodes."""
        return self.compute.expect_ms(nodes) + self.rest.expect_ms(nodes)

    def trim(self, tree: DraftTree, pending: int = 1) -> DraftTree:
        """The best part of ``tree``, whose nodes must come most probable first.

        Expected tokens of ``n`` nodes are one, the target's own, plus the sum of their probabilities.
        """
        if not self.rest.known:
            return tree.head(FIRST_NODES)
        best, best_rate, tokens = 0, 1.0 / self.expect_ms(pending), 1.0
        for count, probability in enumerate(tree.probabilities, start=1):
            tokens += probability
            rate = tokens / self.expect_ms(pending + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return tree.head(best)

    def observe(self, nodes: int, step_ms: float, compute_ms: float = 0.0) -> None:
        """Learn what a step of ``nodes`` nodes took, ``compute_ms`` of it computing on both sides."""
        most_ms = STALL * self.expect_ms(nodes)
        self.compute.observe(nodes, compute_ms)
        self.rest.observe(nodes, max(0.0, step_ms - compute_ms), most_ms)
