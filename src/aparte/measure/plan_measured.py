"""What ``aparte bench step`` or ``aparte bench load`` measured, as a plan uses it.

From ``bench step`` comes the time of a pass by its nodes, measured pass by pass. From ``bench load`` comes
the same, fitted to the average passes of its numbers of devices (``fixed + nodes x each``, as the scheduler
fits it), and besides what a step takes that is neither pass, nor queue, nor round trip: the device, the
number formats, and what a real crowd adds.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aparte.cloud.pass_cost import PassCost
from aparte.config import Cut
from aparte.errors import UserError
from aparte.measure.plan_queue import Crowd, Curve, simulate

SEQUENTIAL = "sequential"
#: What the rows of a load are compared by: a column of its own, and of the simulation.
COMPARED = ("tok_s", "step_p50_ms", "step_p95_ms")


@dataclass(frozen=True)
class Steps:
    """A step of one device, of ``nodes`` nodes that bring ``tokens``; ``rest_ms`` is neither its pass, nor
    waiting for one, nor the round trip."""

    decode: str
    nodes: float
    tokens: float
    rest_ms: float
    rtt_ms: float
    mbps: float | None


@dataclass(frozen=True)
class Measured:
    """The time of a pass by its nodes; from ``bench load`` a device's steps, too, and rows to compare."""

    curve: Curve
    steps: Steps | None = None
    rows: tuple[dict[str, float], ...] = ()

    @classmethod
    def read(cls, file: Path, cut: Cut) -> Measured:
        """Raises :class:`UserError` for what is not the output of one of the two with ``--json``, or was
        measured at another cut."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            rows, there = found["rows"], found.get("cut")
            is_load = bool(rows) and "clients" in rows[0]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _no_measurement(file, type(error).__name__) from None
        if isinstance(there, str) and there != str(cut):
            raise UserError(
                f"{file} was measured with the cut {there}, and this plan is for {cut}. Measure again with "
                f"--cut {cut}, or plan with --cut {there}."
            )
        return cls._of_load(file, found) if is_load else cls(Curve.read(file))

    @classmethod
    def _of_load(cls, file: Path, found: dict[str, Any]) -> Measured:
        try:
            rows = tuple(
                {name: float(row[name]) for name in (*_ROW, *COMPARED)}
                for row in sorted(found["rows"], key=lambda row: int(row["clients"]))
            )
            decode, link = str(found["decode"]), found["link"]
            rtt_ms, mbps = float(link["rtt_ms"]), None if link["mbps"] is None else float(link["mbps"])
        except (ValueError, TypeError, KeyError) as error:
            raise _no_measurement(file, type(error).__name__) from None
        numbers = [*(value for row in rows for value in row.values()), rtt_ms, 1.0 if mbps is None else mbps]
        least = min(min(row["clients"], row["nodes_per_step"], row["tokens_per_step"]) for row in rows)
        if not all(0 <= value < math.inf for value in numbers) or least < 1 or mbps == 0:
            raise _no_measurement(file, "numbers that cannot be")
        cost = PassCost()
        for row in rows:
            cost.observe(row["pass_nodes"], row["pass_ms"])  # type: ignore[arg-type]
        if cost.fit_ms is None:
            raise UserError(
                f"{file} holds passes of about one size, which say nothing about larger ones. Measure more "
                f"different numbers of devices: aparte bench load MODEL --clients 1,2,4,8 --json > {file}"
            )
        fixed, each = cost.fit_ms
        one = rows[0]
        rest_ms = one["step_p50_ms"] - one["cloud_p50_ms"] - one["queue_p50_ms"] - rtt_ms
        return cls(
            Curve.straight(fixed + each, each, f"{file.name}: fitted to the passes of aparte bench load"),
            Steps(decode, one["nodes_per_step"], one["tokens_per_step"], max(0.0, rest_ms), rtt_ms, mbps),
            rows,
        )

    def compared(self) -> list[dict[str, float]]:
        """Each row of the load beside what the simulation gives for the same devices and link."""
        if self.steps is None:
            return []
        found = []
        for row in self.rows:
            crowd = Crowd(
                int(row["clients"]),
                self.steps.rtt_ms + self.steps.rest_ms,
                row["nodes_per_step"],
                row["tokens_per_step"],
            )
            outcome = simulate(crowd, self.curve)
            found.append(
                {"clients": crowd.users}
                | {name: row[name] for name in COMPARED}
                | {f"simulated_{name}": round(getattr(outcome, name), 3) for name in COMPARED}
            )
        return found


_ROW = (
    *("clients", "pass_ms", "pass_nodes", "nodes_per_step", "tokens_per_step"),
    *("cloud_p50_ms", "queue_p50_ms"),
)


def _no_measurement(file: Path, why: str) -> UserError:
    return UserError(
        f"{file} is not the output of `aparte bench step --json` or `aparte bench load --json` of this "
        f"version ({why}). Write it with: aparte bench step MODEL --json > {file}"
    )
