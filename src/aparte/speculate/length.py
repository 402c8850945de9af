"""How long a drafted chain should be: the closed form, and what it needs, learned while running.

A chain of ``d`` tokens, each right with chance ``a`` if all before it are, commits on average
``E(d) = (1 - a^(d+1)) / (1 - a)`` tokens, the verifier's own included (Leviathan et al. 2023, equation 1). It
takes ``t_rtt + t_verify(d) + d t_edge``. The best ``d`` is where one more token would add less to the
numerator, per millisecond, than the whole brings now.
"""

from __future__ import annotations

from dataclasses import dataclass

from aparte.speculate.budget import StepCost
from aparte.speculate.pace import FadingMean

#: Longest chain that is thought about.
LONGEST = 16
#: Length until a step's time is known, and the chance that a token is right, with the weight of some tokens.
FIRST_LENGTH = 4
FIRST_CHANCE, FIRST_WEIGHT = 0.7, 8.0
#: A time of more than so many times the mean counts as so many times the mean (a stall, not a trend).
STALL = 3.0


@dataclass(frozen=True)
class ChainTimes:
    """Milliseconds: ``round_ms`` of a step without drafts (round trip and pass), more per node and drafted
    token."""

    round_ms: float
    node_ms: float
    edge_ms: float

    def of(self, length: int) -> float:
        """A step with a chain of that length, drafting included."""
        return self.round_ms + length * (self.node_ms + self.edge_ms)


def expected_tokens(chance: float, length: int) -> float:
    """``E(d)``: tokens that a step with a chain of ``length`` commits."""
    return float(1 + length) if chance >= 1 else (1 - chance ** (length + 1)) / (1 - chance)


def best_length(chance: float, times: ChainTimes, longest: int = LONGEST) -> int:
    """The chain length that commits most tokens per time; 0 is none at all."""
    return max(
        range(longest + 1),
        key=lambda length: (expected_tokens(chance, length) / max(1e-9, times.of(length)), -length),
    )


class LengthPlan:
    """Learns chance and times from steps, the older the less, and says whether a chain should go on.

    If it ``spares_cloud``, the times are those of the cloud: the way there and drafting count for nothing.
    """

    def __init__(self, *, spares_cloud: bool = False) -> None:
        self._spares_cloud = spares_cloud
        self._step = StepCost()
        self._edge_ms = FadingMean()
        self._right = FadingMean()

    @property
    def chance(self) -> float:
        """That a drafted token is right, if all before it are."""
        return self._right.mean_from(FIRST_CHANCE, FIRST_WEIGHT)

    @property
    def edge_ms(self) -> float:
        """What drafting a token takes, or, for trees, a pass of the models; 0 until it was seen."""
        return 0.0 if self._spares_cloud else self._edge_ms.mean or 0.0

    @property
    def times(self) -> ChainTimes | None:
        """None until a step was seen."""
        if not self._step.known:
            return None
        return ChainTimes(max(0.1, self._step.expect_ms(1)), self._step.ms_per_node, self.edge_ms)

    def drafted(self, tokens: int, ms: float) -> None:
        """Drafting so many tokens, or so many passes for a tree, took that long."""
        if tokens:
            self._edge_ms.add_time(ms / tokens)

    def verified(self, drafts: int, ms: float, cloud_ms: float = 0.0) -> None:
        """A step with so many drafts beside the pending token took that long, without the drafting; and the
        cloud ``cloud_ms`` of it."""
        self._step.observe(1 + drafts, cloud_ms if self._spares_cloud else ms)

    def judged(self, right: bool) -> None:
        """What became of a drafted token below a path that was accepted."""
        self._right.add(right)

    def goes_on(self, length: int, reached: float, tokens: float) -> bool:
        """Whether to draft one more token after ``length`` of them.

        All of those are right with chance ``reached``, and the step commits ``tokens`` on average so far.
        With ``reached = a^d`` and ``tokens = E(d)`` this ends at :func:`best_length`.
        """
        times = self.times
        if times is None:
            return length < FIRST_LENGTH
        gain = reached * self.chance / max(1e-9, times.node_ms + times.edge_ms)
        return length < LONGEST and gain > tokens / times.of(length)

    def pays(
        self, gain: float, nodes: int, edge_ms: float, tokens: float, size: int, drafted_ms: float
    ) -> bool:
        """Whether to add ``nodes`` nodes, for which ``edge_ms`` of drafting is needed, to a tree of ``size``.

        They bring ``gain`` tokens on average, and the step ``tokens`` without them, after ``drafted_ms`` of
        drafting.
        """
        times = self.times
        if times is None:
            return size < FIRST_LENGTH
        cost_ms = nodes * times.node_ms + edge_ms
        whole_ms = times.round_ms + size * times.node_ms + drafted_ms
        return gain / max(1e-9, cost_ms) > tokens / whole_ms
