"""A distribution over some tokens: what a drafter drew a token from, and says so to the verifier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens with their shares of a distribution over the whole vocabulary, best first.
Row = Sequence[tuple[int, float]]
#: The choice that was not made, after a node that is not on the accepted path.
UNDECIDED = -1
#: How far the sum may be from 1: float32 rounding over many tokens, not more.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Distribution:
    """``probabilities[i]`` belongs to ``tokens[i]``; tokens that are not named have none.

    Raises ``ValueError`` unless ids are unique and not negative, and probabilities finite, not negative and
    together 1 (within :data:`TOLERANCE`).
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.probabilities) or not self.tokens:
            raise ValueError("A distribution needs one probability per token, and at least one token.")
        if len(set(self.tokens)) != len(self.tokens) or min(self.tokens) < 0:
            raise ValueError("A distribution names a token twice, or a negative one.")
        # A comparison with NaN is false.
        if not all(0 <= value <= 1 + TOLERANCE for value in self.probabilities):
            raise ValueError("A distribution holds something that is no probability.")
        if abs(math.fsum(self.probabilities) - 1) > TOLERANCE:
            raise ValueError("The probabilities of a distribution do not sum to 1.")

    @classmethod
    def only(cls, token: int) -> Distribution:
        """What a token that is named without drawing comes from."""
        return cls((token,), (1.0,))

    def __len__(self) -> int:
        return len(self.tokens)
