"""The cost model of a split over a link, fitted to measured runs, and checked on runs it has not seen.

    time = rounds x (round trip + fixed) + drafting rounds x drafting + nodes x cost + bytes / bandwidth
    fixed = base + cooling x ln(1 + round trip / 20 ms)

Paper A's section 6.3 has the first term only, and a constant in it. But a processor that waited for long
computes the next step more slowly: caches, clock and threads have gone to rest. By docs/benchmarks.md
("Beside other systems", sequential) a token takes some 9 ms more at a round trip of 150 ms than at 20 ms,
apart from the round trip itself. Where it does not grow, the fit gives 0.

Everything here is arithmetic on numbers: no clock, no socket.
Times are in milliseconds, bandwidths in 10^6 bits per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from aparte.measure.decomposition import Bandwidth, transfer_ms

Array = numpy.typing.NDArray[numpy.float64]
#: Between these shares of the resampled projections the interval lies.
LOW, HIGH = 0.05, 0.95
RESAMPLINGS = 400
#: A wait of about this length, in ms, is there on the shortest link too: the other side's computing.
COOLING_MS = 20.0


@dataclass(frozen=True)
class Run:
    """Some answers over one link with one limit on speculative nodes; sums over their steps.

    ``limit`` is 0 for sequential decoding. ``rtt_ms`` and ``bandwidth`` are those of the link, as set or as
    measured; ``ms`` is wall time.
    """

    rtt_ms: float
    bandwidth: Bandwidth
    limit: int
    tokens: int
    rounds: int
    nodes: int
    bytes_up: int
    bytes_down: int
    ms: float
    #: Which answers these are.
    prompt: str = ""

    @property
    def tok_s(self) -> float:
        return self.tokens * 1e3 / self.ms

    @property
    def link(self) -> tuple[float, float | None, float | None]:
        return self.rtt_ms, self.bandwidth.mbps_up, self.bandwidth.mbps_down

    @property
    def drafting_rounds(self) -> int:
        return self.rounds if self.limit else 0

    @property
    def link_ms(self) -> float:
        """What the link alone takes of it."""
        return (
            self.rounds * self.rtt_ms
            + transfer_ms(self.bytes_up, self.bandwidth.mbps_up)
            + transfer_ms(self.bytes_down, self.bandwidth.mbps_down)
        )


@dataclass(frozen=True)
class Traffic:
    """What a step carries and brings on average, with one limit on nodes."""

    tokens: float
    nodes: float
    bytes_up: float
    bytes_down: float

    def between(self, other: Traffic, share: float) -> Traffic:
        """So far on the way to ``other``."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Traffic(*(mine + share * (theirs - mine) for mine, theirs in pairs))


@dataclass(frozen=True)
class Costs:
    """The fitted part, and what steps carry, by limit on nodes.

    ``base_ms`` per round trip, ``cooling_ms`` on top by how long it is, ``drafting_ms`` on top with
    speculation, ``node_ms`` per speculative node. ``drafting_ms`` may be negative, where the first nodes cost
    less than the later ones; drafts never cost less than nothing, though.
    """

    base_ms: float
    drafting_ms: float
    node_ms: float
    cooling_ms: float
    traffic: dict[int, Traffic]

    def fixed_ms(self, rtt_ms: float) -> float:
        """Of a round trip without drafts, apart from the link."""
        return self.base_ms + self.cooling_ms * _cooling(rtt_ms)

    def at(self, limit: int) -> Traffic:
        """Measured, or between the two neighbours that were, by the logarithm of the nodes.

        Raises :class:`KeyError` outside of what was measured.
        """
        if limit in self.traffic:
            return self.traffic[limit]
        below = max((known for known in self.traffic if known < limit), default=None)
        above = min((known for known in self.traffic if known > limit), default=None)
        if below is None or above is None:
            raise KeyError(limit)
        share = math.log((limit + 1) / (below + 1)) / math.log((above + 1) / (below + 1))
        return self.traffic[below].between(self.traffic[above], share)

    def step_ms(self, rtt_ms: float, bandwidth: Bandwidth, limit: int, shift_ms: float = 0.0) -> float:
        """One round trip; ``shift_ms`` is added to the compute of both sides."""
        traffic = self.at(limit)
        return (
            rtt_ms
            + self.fixed_ms(rtt_ms)
            + shift_ms
            + (max(0.0, self.drafting_ms + traffic.nodes * self.node_ms) if limit else 0.0)
            + transfer_ms(traffic.bytes_up, bandwidth.mbps_up)
            + transfer_ms(traffic.bytes_down, bandwidth.mbps_down)
        )

    def tok_s(self, rtt_ms: float, bandwidth: Bandwidth, limit: int, shift_ms: float = 0.0) -> float:
        """Tokens per second, without the prompt."""
        return self.at(limit).tokens * 1e3 / self.step_ms(rtt_ms, bandwidth, limit, shift_ms)


@dataclass(frozen=True)
class Fold:
    """A run that was predicted from others."""

    run: Run
    predicted_tok_s: float

    @property
    def error(self) -> float:
        """Relative, above zero if the prediction is too fast."""
        return self.predicted_tok_s / self.run.tok_s - 1

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "rtt_ms": round(run.rtt_ms, 3),
            "mbps_up": run.bandwidth.mbps_up and round(run.bandwidth.mbps_up, 2),
            "mbps_down": run.bandwidth.mbps_down and round(run.bandwidth.mbps_down, 2),
            "max_nodes": run.limit,
            "prompt": run.prompt,
            "measured_tok_s": round(run.tok_s, 3),
            "predicted_tok_s": round(self.predicted_tok_s, 3),
            "error": round(self.error, 4),
        }


def fit(runs: Sequence[Run]) -> Costs:
    """Least squares of relative errors, no cost below zero, drafts as a whole being one cost; traffic is that
    of all runs of a limit.

    Raises :class:`ValueError` without runs.
    """
    if not runs:
        raise ValueError("there is nothing to fit")
    rows = numpy.array([[run.rounds, run.drafting_rounds, run.nodes] for run in runs], dtype=float)
    if len({run.rtt_ms for run in runs}) > 1:  # else it cannot be told from the base
        cooling = numpy.array([[run.rounds * _cooling(run.rtt_ms)] for run in runs])
        rows = numpy.hstack([rows, cooling])
    left = numpy.array([run.ms - run.link_ms for run in runs])
    weights = numpy.array([1 / run.ms for run in runs])
    drafted = rows[:, 1] > 0
    costs = [
        float(cost)
        for cost in _least_squares(
            rows * weights[:, None], left * weights, rows[drafted][:, [1, 2]] / rows[drafted][:, [1]]
        )
    ]
    base, drafting, node, cooled = (*costs, 0.0)[:4]
    return Costs(base, drafting, node, cooled, _traffic(runs))


def _cooling(rtt_ms: float) -> float:
    return math.log1p(rtt_ms / COOLING_MS)


def _least_squares(rows: Array, values: Array, drafts: Array) -> Array:
    """Least squares with no coefficient below zero but that of drafting, which is one as long as ``drafts``,
    rounds and nodes per drafting round, then never cost less than nothing.

    The best of all subsets of columns, of which there are few.
    """
    count = rows.shape[1]
    best, least = numpy.zeros(count), math.inf
    for subset in range(1, 1 << count):
        chosen = [column for column in range(count) if subset >> column & 1]
        part, *_ = numpy.linalg.lstsq(rows[:, chosen], values, rcond=None)
        whole = numpy.zeros(count)
        whole[chosen] = part
        if (whole[[0, *range(2, count)]] < 0).any() or (drafts @ whole[[1, 2]] < -1e-9).any():
            continue
        error = float(numpy.sum((rows[:, chosen] @ part - values) ** 2))
        if error < least - 1e-15:
            best, least = whole, error
    return best


def _traffic(runs: Sequence[Run]) -> dict[int, Traffic]:
    found: dict[int, Traffic] = {}
    for limit in sorted({run.limit for run in runs}):
        same = [run for run in runs if run.limit == limit]
        rounds = sum(run.rounds for run in same)
        found[limit] = Traffic(
            sum(run.tokens for run in same) / rounds,
            sum(run.nodes for run in same) / rounds,
            sum(run.bytes_up for run in same) / rounds,
            sum(run.bytes_down for run in same) / rounds,
        )
    return found


def cross_validate(runs: Sequence[Run]) -> list[Fold]:
    """Predict every run from those of the other links; on one link only, from those of the other prompts.

    What steps of the run carry is known of the other runs only, too. With neither links nor prompts to leave
    out there are no folds.
    """
    groups = {run.link for run in runs}
    group: Callable[[Run], Hashable] = (lambda run: run.link) if len(groups) > 1 else (lambda run: run.prompt)
    folds = []
    for run in runs:
        others = [other for other in runs if group(other) != group(run)]
        if run.limit not in {other.limit for other in others}:
            continue
        predicted = fit(others).tok_s(run.rtt_ms, run.bandwidth, run.limit)
        folds.append(Fold(run, predicted))
    return folds


def errors(folds: Sequence[Fold]) -> tuple[float | None, float | None]:
    """Median and worst of the absolute relative errors; None without folds."""
    if not folds:
        return None, None
    sizes = [abs(fold.error) for fold in folds]
    return float(numpy.median(sizes)), max(sizes)


class Projector:
    """Projects speeds with intervals, from resampled runs and from the errors of the folds. Seeded."""

    def __init__(self, runs: Sequence[Run], folds: Sequence[Fold], seed: int = 0) -> None:
        self.costs = fit(runs)
        chance = numpy.random.default_rng(seed)
        by_limit = [[run for run in runs if run.limit == limit] for limit in self.costs.traffic]
        self._resampled = [
            fit([same[index] for same in by_limit for index in chance.integers(len(same), size=len(same))])
            for _ in range(RESAMPLINGS)
        ]
        missed = [fold.run.tok_s / fold.predicted_tok_s for fold in folds] or [1.0]
        self._missed = chance.choice(missed, size=RESAMPLINGS)

    def project(
        self, rtt_ms: float, bandwidth: Bandwidth, limit: int, shift_ms: float = 0.0
    ) -> tuple[float, float, float]:
        """Tokens per second: expected, and the interval that holds nine of ten."""
        speeds = numpy.array([costs.tok_s(rtt_ms, bandwidth, limit, shift_ms) for costs in self._resampled])
        low, high = numpy.quantile(speeds * self._missed, [LOW, HIGH])
        expected = self.costs.tok_s(rtt_ms, bandwidth, limit, shift_ms)
        return expected, min(float(low), expected), max(float(high), expected)
