"""How many nodes a step should carry, so that the cloud computes as little as possible for the answer.

For that, neither round trips nor drafting count. A node is worth its row of the pass if it brings more
tokens than the cloud writes in that time otherwise: ``p > rate x (C(n + 1) - C(n))``, with the learned curve
``C`` of the cloud's compute and its ``rate`` of tokens so far. So sizes differ from step to step: where the
draft is sure a step gets many nodes, elsewhere hardly any, which no fixed number of nodes can do.
"""

from __future__ import annotations

from aparte.speculate.budget import ComputeCurve, Room
from aparte.speculate.tree import DraftTree

#: Nodes of the first steps, when nothing is known.
FIRST_NODES = 4
#: Weight of what was seen before, per further step.
FADE = 0.98
#: Estimates count as if so many tokens had been hoped for, and come, before.
TRUST_WEIGHT = 20.0


class CloudBudget:
    """A :class:`~aparte.speculate.budget.Budget`; it holds from answer to answer."""

    def __init__(self) -> None:
        self.cloud = ComputeCurve()
        self._tokens = 0.0
        self._ms = 0.0
        self._hoped = 0.0
        self._came = 0.0
        self._room = Room()

    @property
    def tokens_per_ms(self) -> float | None:
        """What the cloud writes while it computes; None until a step was seen."""
        return self._tokens / self._ms if self._ms > 0 else None

    def room(self, most: int) -> int:
        return self._room.within(most)

    def trim(self, tree: DraftTree, pending: int = 1) -> DraftTree:
        rate = self.tokens_per_ms
        if rate is None:
            return tree.head(FIRST_NODES)
        trust = (self._came + TRUST_WEIGHT) / (self._hoped + TRUST_WEIGHT)
        before_ms, gain = self.cloud.expect_ms(pending), 0.0
        best, best_worth = 0, 0.0
        for count, probability in enumerate(tree.probabilities, start=1):
            gain += trust * probability
            worth = gain - rate * (self.cloud.expect_ms(pending + count) - before_ms)
            if worth > best_worth:
                best, best_worth = count, worth
        self._room.kept(best)
        return tree.head(best)

    def observe(
        self,
        nodes: int,
        step_ms: float,  # noqa: ARG002
        compute_ms: float = 0.0,  # noqa: ARG002
        *,
        cloud_ms: float = 0.0,
        tokens: int = 0,
        hoped: float = 0.0,
    ) -> None:
        self.cloud.observe(nodes, cloud_ms)
        self._tokens = FADE * self._tokens + tokens
        self._ms = FADE * self._ms + cloud_ms
        # One of the tokens is the verifier's own.
        self._came = FADE * self._came + max(0, tokens - 1)
        self._hoped = FADE * self._hoped + max(0.0, hoped - 1)
