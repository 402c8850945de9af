"""How often candidates of a kind turn out right, learned while running."""

from __future__ import annotations

from collections.abc import Hashable

from aparte.speculate.source import Candidate

#: A first guess counts like this many observations.
PRIOR_WEIGHT = 4.0
#: Old observations fade, so that a change of topic is noticed.
FADE = 0.995


class Calibration:
    """Estimated chance of being the target's choice, by kind of candidate."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, float]] = {}  # kind -> trials, hits

    def probability(self, candidate: Candidate) -> float:
        """``(hits + w prior) / (trials + w)``; between the first guess and what was seen."""
        trials, hits = self._seen.get(candidate.kind, (0.0, 0.0))
        return (hits + PRIOR_WEIGHT * candidate.prior) / (trials + PRIOR_WEIGHT)

    def record(self, candidate: Candidate, hit: bool) -> None:
        """One candidate at a place where the target's choice is known."""
        trials, hits = self._seen.get(candidate.kind, (0.0, 0.0))
        self._seen[candidate.kind] = (FADE * trials + 1, FADE * hits + hit)
