"""How often candidates of a kind turn out right, learned while running.

It starts from what was measured on the project's own prompts with the default model
(``benchmarks/calibration.py`` writes ``priors.json``), which a few dozen observations outweigh.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

from aparte.speculate.source import Candidate, Kind

#: Trials and hits by kind.
Counts = dict[Kind, tuple[float, float]]

PRIORS = Path(__file__).with_name("priors.json")
#: What was measured elsewhere counts like this many observations at most.
START_WEIGHT = 30.0
#: The first guess for a kind that was never seen counts like this many.
GUESS_WEIGHT = 4.0
#: Old observations fade, so that a change of topic is noticed.
FADE = 0.995


class Calibration:
    """Estimated chance of being the target's choice, by kind of candidate."""

    def __init__(self, start: Mapping[Kind, tuple[float, float]] | None = None, fade: float = FADE) -> None:
        self.counts: Counts = dict(measured_before() if start is None else start)
        self._fade = fade

    def probability(self, candidate: Candidate) -> float:
        """``(hits + w guess) / (trials + w)``; between the first guess and what was seen."""
        trials, hits = self.counts.get(candidate.kind, (0.0, 0.0))
        return (hits + GUESS_WEIGHT * candidate.prior) / (trials + GUESS_WEIGHT)

    def record(self, candidate: Candidate, hit: bool) -> None:
        """One candidate at a place where the target's choice is known."""
        trials, hits = self.counts.get(candidate.kind, (0.0, 0.0))
        self.counts[candidate.kind] = (self._fade * trials + 1, self._fade * hits + hit)


@functools.cache
def measured_before() -> Counts:
    """The starting point."""
    rows = json.loads(PRIORS.read_text(encoding="utf-8"))
    return scaled({tuple(kind): (trials, hits) for kind, trials, hits in rows})


def scaled(counts: Counts) -> Counts:
    """Each kind with :data:`START_WEIGHT` trials at most."""
    return {
        kind: (trials * min(1.0, START_WEIGHT / trials), hits * min(1.0, START_WEIGHT / trials))
        for kind, (trials, hits) in counts.items()
    }
