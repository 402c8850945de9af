"""The figures of a budget grid: regret by link, and what a node budget buys by task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from aparte.errors import UserError
from aparte.measure.budget_grid import AUTOMATIC, BUDGETS, FIXED, Run
from aparte.measure.specbench import TASKS
from aparte.measure.wan_link import WanProfile

#: The link that the figures by task are of, if it was measured.
BY_TASK = WanProfile(rtt_ms=80, mbps=100)
#: Resamplings of the questions, and what is cut off at each end for the interval.
RESAMPLINGS = 400
TAIL = 0.05


def regret(automatic: float, best: float) -> float:
    """Share of the best fixed budget's speed that the automatic one loses; below 0 it is the faster one."""
    return 1 - automatic / best


def summarize(rows: Sequence[dict[str, Any]], links: Sequence[WanProfile]) -> dict[str, Any]:
    """One row per link, and for one of the links figures by task and budget and their macro average."""
    by_link = {
        link: [row for row in rows if (row["rtt_ms"], row["mbps"]) == (link.rtt_ms, link.mbps)]
        for link in links
    }
    table = [_link_row(found, link) for link, found in by_link.items()]
    shown = BY_TASK if BY_TASK in by_link else links[0]
    present = [task for task in TASKS if any(row["task"] == task for row in by_link[shown])]
    categories = {
        task: {
            budget: _figures([row for row in by_link[shown] if row["task"] == task], budget, shown)
            for budget in BUDGETS
        }
        for task in present
    }
    macro = {
        budget: {
            key: round(sum(categories[task][budget][key] for task in present) / len(present), 4)
            for key in ("mat", "tok_s", "nodes_per_step")
        }
        for budget in BUDGETS
    }
    return {
        "rows": table,
        "worst_regret": max(row["regret"] for row in table),
        "macro": macro,
        "categories": categories,
        "categories_link": {"rtt_ms": shown.rtt_ms, "mbps": shown.mbps},
        "identical": all(row["identical"] for row in rows),
        "different": sorted({row["id"] for row in rows if not row["identical"]}),
        "questions": len({row["id"] for row in rows}),
    }


def _link_row(rows: Sequence[dict[str, Any]], link: WanProfile) -> dict[str, Any]:
    speeds = {budget: _tok_s(_runs(rows, budget), link) for budget in BUDGETS}
    best = max(FIXED, key=lambda budget: speeds[budget])
    low, high = _interval(_runs(rows, AUTOMATIC), _runs(rows, best), link)
    return {
        "rtt_ms": link.rtt_ms,
        "mbps": link.mbps,
        "budgets": {budget: round(speeds[budget], 3) for budget in FIXED},
        "automatic": round(speeds[AUTOMATIC], 3),
        "automatic_nodes": _figures(rows, AUTOMATIC, link)["nodes_per_step"],
        "best": int(best),
        "regret": round(regret(speeds[AUTOMATIC], speeds[best]), 4),
        "regret_low": round(low, 4),
        "regret_high": round(high, 4),
    }


def _interval(automatic: Sequence[Run], best: Sequence[Run], link: WanProfile) -> tuple[float, float]:
    """Where the regret lies in nine of ten resamplings of the questions: what a subset leaves open."""
    draw = random.Random(0)
    found = []
    for _ in range(RESAMPLINGS):
        picked = draw.choices(range(len(best)), k=len(best))
        pair = [_speed([runs[index] for index in picked], link) for runs in (automatic, best)]
        if all(pair):
            found.append(regret(pair[0], pair[1]))
    found.sort()
    cut = int(TAIL * len(found))
    return found[cut], found[-1 - cut]


def _runs(rows: Sequence[dict[str, Any]], budget: str) -> list[Run]:
    return [Run(**row["runs"][budget]) for row in rows]


def _tok_s(runs: Sequence[Run], link: WanProfile) -> float:
    speed = _speed(runs, link)
    if not speed:
        raise UserError(
            "The answers end with their first step, so there is nothing to time. Use more --max-new-tokens, "
            "or other questions."
        )
    return speed


def _speed(runs: Sequence[Run], link: WanProfile) -> float:
    """Tokens per second on the link, prefill excluded; 0 if nothing was timed."""
    ms = sum(run.timed_ms(link) for run in runs)
    return 1e3 * sum(run.timed_tokens for run in runs) / ms if ms else 0.0


def _figures(rows: Sequence[dict[str, Any]], budget: str, link: WanProfile) -> dict[str, float]:
    runs = _runs(rows, budget)
    steps = sum(run.steps for run in runs)
    return {
        "mat": round(sum(run.tokens for run in runs) / steps, 4),
        "tok_s": round(_speed(runs, link), 3),
        "nodes_per_step": round(sum(run.drafted for run in runs) / steps, 3),
    }


def cells(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of regret, for people."""
    heads = ["RTT ms", "Mbit/s", *FIXED, AUTOMATIC, "its nodes", "best", "regret", "90 %"]
    return heads, [
        [
            f"{row['rtt_ms']:g}",
            f"{row['mbps']:g}",
            *(f"{row['budgets'][budget]:.2f}" for budget in FIXED),
            f"{row['automatic']:.2f}",
            f"{row['automatic_nodes']:.1f}",
            str(row["best"]),
            f"{row['regret']:.1%}".replace("%", " %"),
            f"{row['regret_low']:.1%} to {row['regret_high']:.1%}".replace("%", " %"),
        ]
        for row in report["rows"]
    ]
