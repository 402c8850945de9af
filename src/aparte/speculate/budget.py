"""How many nodes a step should carry, from what steps have cost so far.

In split mode a node costs its hidden state both ways and a row of compute on both sides. The budget adds
the next most probable node as long as that raises expected tokens per expected millisecond.
"""

from __future__ import annotations

from aparte.speculate.tree import DraftTree

#: Weight of a step after one more step: the estimate follows a changed link within some ten steps.
FADE = 0.9
#: Until steps of different sizes were seen: one node costs about this, with the weight of some steps.
PRIOR_MS_PER_NODE = 1.0
PRIOR_WEIGHT = 20.0
#: Nodes of the first step, when nothing is known.
FIRST_NODES = 8
#: A step that takes this many times what was expected counts as this many times (a stall, not a trend).
STALL = 3.0


class StepCost:
    """Expected time of a step, ``fixed_ms + nodes * ms_per_node``, by least squares with fading memory."""

    def __init__(self) -> None:
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
            return PRIOR_MS_PER_NODE
        spread = self._nodes_nodes - self._nodes**2 / self._weight
        together = self._nodes_ms - self._nodes * self._ms / self._weight
        return max(0.0, (together + PRIOR_WEIGHT * PRIOR_MS_PER_NODE) / (spread + PRIOR_WEIGHT))

    def expect_ms(self, nodes: float) -> float:
        """Expected time of a step of ``nodes`` nodes."""
        if not self.known:
            return nodes * PRIOR_MS_PER_NODE
        mean_nodes, mean_ms = self._nodes / self._weight, self._ms / self._weight
        return max(0.1, mean_ms + self.ms_per_node * (nodes - mean_nodes))

    def observe(self, nodes: int, step_ms: float) -> None:
        """A step of ``nodes`` nodes took ``step_ms``."""
        if self.known:
            step_ms = min(step_ms, STALL * self.expect_ms(nodes))
        self._weight = FADE * self._weight + 1
        self._nodes = FADE * self._nodes + nodes
        self._ms = FADE * self._ms + step_ms
        self._nodes_nodes = FADE * self._nodes_nodes + nodes * nodes
        self._nodes_ms = FADE * self._nodes_ms + nodes * step_ms


class NodeBudget:
    """Cuts trees to the size that promises most tokens per millisecond."""

    def __init__(self) -> None:
        self.cost = StepCost()

    def trim(self, tree: DraftTree, pending: int = 1) -> DraftTree:
        """The best part of ``tree``, whose nodes must come most probable first.

        Expected tokens of ``n`` nodes are one, the target's own, plus the sum of their probabilities.
        """
        if not self.cost.known:
            return tree.head(FIRST_NODES)
        best, best_rate, tokens = 0, 1.0 / self.cost.expect_ms(pending), 1.0
        for count, probability in enumerate(tree.probabilities, start=1):
            tokens += probability
            rate = tokens / self.cost.expect_ms(pending + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return tree.head(best)

    def observe(self, nodes: int, step_ms: float) -> None:
        """Learn what a step of ``nodes`` nodes took."""
        self.cost.observe(nodes, step_ms)
