"""Two more ways to use a drafter: beside the verifier, and while the verifier computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aparte.measure.spade import AHEAD, CLOUD, COLOCATED, ONE, RTTS_MS
from aparte.measure.spade_run import Run


def colocated(runs: Mapping[str, Sequence[Run]], mbps: float, *, exact: bool) -> list[dict[str, Any]]:
    """One row for each block length that the drafter wrote with beside the verifier; ``runs`` are by way.

    Drafting is the cloud's time there. Nothing but the text crosses the link, in one round trip per answer.
    """
    alone, prefix = runs[CLOUD], COLOCATED.format("")
    lengths = sorted(int(way.removeprefix(prefix)) for way in runs if way.startswith(prefix))
    rows = []
    for length in lengths:
        mine = runs[COLOCATED.format(length)]
        count, tokens, steps = len(mine), _total(mine, "tokens"), _total(mine, "steps")
        drafted, draft_ms = _total(mine, "drafted"), _total(mine, "edge_ms")
        cloud_ms = _total(mine, "cloud_ms") + draft_ms
        reduction = 1 - (steps / tokens) / (_total(alone, "steps") / _total(alone, "tokens"))
        rows.append(
            {
                "d": length,
                "cloud_calls_per_answer": round(steps / count, 2),
                "call_reduction": round(reduction, 4),
                "cloud_ms_per_answer": round(cloud_ms / count, 2),
                "draft_ms_per_answer": round(draft_ms / count, 2),
                "cloud_time_ratio": round(cloud_ms / tokens / per_token_ms(alone), 4),
                "tok_s": speeds(tokens, _total(mine, "compute_ms"), count, 4 * tokens, mbps),
                "tokens_per_answer": round(tokens / count, 2),
                "tokens_per_call": round(tokens / steps, 4),
                "acceptance": round(_total(mine, "accepted") / drafted, 4) if drafted else 0.0,
                "identical": _same(mine, alone) if exact else None,
            }
        )
    return rows


def pipelined(runs: Mapping[str, Sequence[Run]], *, exact: bool) -> list[dict[str, Any]]:
    """One row for each round trip: with one block under way at a time, and with drafting on meanwhile."""
    alone, rows = runs[CLOUD], []
    for rtt in RTTS_MS:
        if AHEAD.format(rtt) not in runs:
            continue
        one, ahead = runs[ONE.format(rtt)], runs[AHEAD.format(rtt)]
        rows.append(
            {
                "rtt_ms": rtt,
                "one_at_a_time": _flow(one, alone),
                "pipelined": _flow(ahead, alone)
                | {
                    "kept_per_answer": round(_total(ahead, "ahead") / len(ahead), 2),
                    "stale_per_answer": round(_total(ahead, "stale") / len(ahead), 2),
                },
                "identical": _same(one, alone) and _same(ahead, alone) if exact else None,
            }
        )
    return rows


def _flow(runs: Sequence[Run], alone: Sequence[Run]) -> dict[str, float]:
    """Speed on the link that the answers were written over, and what the cloud did for it, stale or not."""
    tokens = _total(runs, "tokens")
    return {
        "tok_s": round(1e3 * tokens / _total(runs, "wall_ms"), 3),
        "cloud_calls_per_answer": round((_total(runs, "steps") + _total(runs, "stale")) / len(runs), 2),
        "cloud_time_ratio": round(per_token_ms(runs) / per_token_ms(alone), 4),
    }


def pipelined_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table for people."""
    heads = ["round trip", "tok/s, one block at a time", "pipelined", "blocks kept", "stale"]
    heads += ["cloud time, one at a time", "pipelined", "identical"]
    table = []
    for row in rows:
        one, ahead = row["one_at_a_time"], row["pipelined"]
        table.append(
            [
                f"{row['rtt_ms']} ms",
                f"{one['tok_s']:.1f}",
                f"{ahead['tok_s']:.1f}",
                f"{ahead['kept_per_answer']:.1f}",
                f"{ahead['stale_per_answer']:.1f}",
                f"{one['cloud_time_ratio']:.2f}",
                f"{ahead['cloud_time_ratio']:.2f}",
                "" if row["identical"] is None else "yes" if row["identical"] else "no",
            ]
        )
    return heads, table


def per_token_ms(runs: Sequence[Run]) -> float:
    """The cloud's compute for a token."""
    return _total(runs, "cloud_ms") / _total(runs, "tokens")


def speeds(tokens: float, ms: float, round_trips: float, size: float, mbps: float) -> dict[str, float]:
    """Tokens per second by round trip: what was computed, and the link by arithmetic."""
    transfer_ms = size * 8 / (mbps * 1e3)
    return {
        str(rtt): round(1e3 * tokens / (ms + transfer_ms + round_trips * rtt), 3) if tokens else 0.0
        for rtt in RTTS_MS
    }


def _total(runs: Sequence[Run], name: str) -> float:
    return float(sum(getattr(run, name) for run in runs))


def _same(runs: Sequence[Run], alone: Sequence[Run]) -> bool:
    return all(one.digest == other.digest for one, other in zip(runs, alone, strict=True))
