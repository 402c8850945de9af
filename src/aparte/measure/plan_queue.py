"""Many users at one cloud, or at several replicas of it: a short simulation of who waits for whom.

Every user sends a step, waits for the answer, and is away for the link and the device's part of a step. A
replica computes one pass at a time, which everybody shares who waits when it begins, as
:mod:`aparte.cloud.scheduler` does it; what a pass takes by its number of nodes is a curve, measured or
assumed. Users stay with their replica. There are no prompts in it and no pauses between answers, so it shows
a cloud that is busy all the time.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aparte.cloud.pass_cost import LEAST_NODES, MOST_NODES, STRETCH
from aparte.errors import UserError

#: Simulated steps per user, after as many as :data:`WARM` that do not count.
STEPS, WARM = 60, 10
#: How much the time away from the cloud varies by chance, each way.
JITTER = 0.05
#: Enough replicas: 95 % of the steps take at most so many times what a step takes for one user alone.
SLOWEST = 1.5
#: More replicas than that are not tried.
MOST_REPLICAS = 64


@dataclass(frozen=True)
class Curve:
    """What a pass takes, in ms, by its nodes: straight lines through ``points``, and on beyond the last."""

    points: tuple[tuple[float, float], ...]
    source: str

    def __post_init__(self) -> None:
        nodes = [node for node, _ in self.points]
        if not nodes or nodes != sorted(set(nodes)) or any(not 0 < ms < math.inf for _, ms in self.points):
            raise UserError(f"{self.source}: the times of a step by its nodes make no curve.")

    def __call__(self, nodes: float) -> float:
        points = self.points
        if nodes <= points[0][0] or len(points) == 1:
            return points[0][1]
        above = next((index for index, (node, _) in enumerate(points) if node >= nodes), len(points) - 1)
        (left, low), (right, high) = points[above - 1], points[above]
        return max(low + (high - low) * (nodes - left) / (right - left), points[0][1])

    @property
    def full(self) -> int:
        """Most nodes of a shared pass, by the scheduler's own rule (:mod:`aparte.cloud.pass_cost`)."""
        (first, low), (last, high) = self.points[0], self.points[-1]
        each = (high - low) / (last - first) if last > first else 0.0
        if each <= 0:
            return MOST_NODES
        return int(min(max(LEAST_NODES, (STRETCH - 1) * max(0.0, low - first * each) / each), MOST_NODES))

    @classmethod
    def straight(cls, one_ms: float, node_ms: float, source: str) -> Curve:
        """``one_ms`` for one node, ``node_ms`` for each more."""
        return cls(((1.0, one_ms), (101.0, one_ms + 100 * node_ms)), source)

    @classmethod
    def read(cls, file: Path) -> Curve:
        """From what ``aparte bench step --json`` printed. Raises :class:`UserError` for anything else."""
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
            points = sorted((float(row["nodes"]), float(row["middle_ms"])) for row in rows)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{file} is not the output of `aparte bench step --json` ({type(error).__name__}). "
                f"Write it with: aparte bench step MODEL --json > {file}"
            ) from None
        return cls(tuple(points), f"{file.name}: middle_ms of aparte bench step")


@dataclass(frozen=True)
class Crowd:
    """``users`` who send steps of ``nodes`` nodes that bring ``tokens``, with ``away_ms`` between them."""

    users: int
    away_ms: float
    nodes: float
    tokens: float


@dataclass(frozen=True)
class Outcome:
    """What the users get of so many replicas. Queueing is what a step waits before its pass."""

    replicas: int
    tok_s: float
    step_p50_ms: float
    step_p95_ms: float
    queue_p95_ms: float
    busy: float

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) for name, value in vars(self).items()}


def simulate(crowd: Crowd, curve: Curve, replicas: int = 1, seed: int = 0) -> Outcome:
    """``crowd`` at so many replicas, spread evenly."""
    steps: list[float] = []
    waits: list[float] = []
    tok_s = busy = 0.0
    for replica in range(min(replicas, crowd.users)):
        users = crowd.users // replicas + (replica < crowd.users % replicas)
        shift = _Shift(crowd, curve, users, random.Random(seed + replica))
        shift.run()
        steps += shift.steps
        waits += shift.waits
        tok_s += shift.counted * crowd.tokens * 1e3 / shift.lasted_ms
        busy += shift.busy_ms / shift.lasted_ms / replicas
    return Outcome(
        replicas,
        tok_s,
        _percentile(steps, 50),
        _percentile(steps, 95),
        _percentile(waits, 95),
        busy,
    )


def enough(crowd: Crowd, curve: Curve) -> list[Outcome]:
    """Outcomes with ever more replicas, up to the first number that is enough."""
    alone_ms = crowd.away_ms + curve(crowd.nodes)
    outcomes: list[Outcome] = []
    replicas = 1
    while replicas <= min(crowd.users, MOST_REPLICAS):
        outcomes.append(simulate(crowd, curve, replicas))
        if outcomes[-1].step_p95_ms <= SLOWEST * alone_ms:
            break
        replicas += 1
    return outcomes


class _Shift:
    """One replica with its users."""

    def __init__(self, crowd: Crowd, curve: Curve, users: int, chance: random.Random) -> None:
        self._crowd = crowd
        self._curve = curve
        self._chance = chance
        self._room = max(1, int(curve.full // crowd.nodes))  # steps that a pass has room for
        # Who arrives when, and has begun the step when.
        self._coming = [(chance.random() * crowd.away_ms, user, 0.0) for user in range(users)]
        heapq.heapify(self._coming)
        self._users = users
        self.steps: list[float] = []
        self.waits: list[float] = []
        self.counted = 0
        self.busy_ms = self.lasted_ms = 0.0

    def run(self) -> None:
        now = began = 0.0
        done, warm = 0, WARM * self._users
        total = warm + STEPS * self._users
        while done < total:
            now = max(now, self._coming[0][0])
            taken: list[tuple[float, int, float]] = []
            while self._coming and self._coming[0][0] <= now and len(taken) < self._room:
                taken.append(heapq.heappop(self._coming))
            pass_ms = self._curve(len(taken) * self._crowd.nodes)
            end = now + pass_ms
            for arrived, user, away_ms in taken:
                if done >= warm:
                    self.waits.append(now - arrived)
                    self.steps.append(away_ms + end - arrived)
                next_away_ms = self._crowd.away_ms * self._chance.uniform(1 - JITTER, 1 + JITTER)
                heapq.heappush(self._coming, (end + next_away_ms, user, next_away_ms))
            if done >= warm:
                self.counted += len(taken)
                self.busy_ms += pass_ms
            elif done + len(taken) >= warm:
                began = end
            done += len(taken)
            now = end
        self.lasted_ms = now - began


def _percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that ``percent`` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
