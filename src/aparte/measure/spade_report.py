"""The figures of a SPADE bench: calls, cloud time, speed by round trip, acceptance, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aparte.errors import UserError
from aparte.measure.scores import score
from aparte.measure.spade import AUTO, BARE, CLOUD, EDGE, PLAIN, RTTS_MS
from aparte.measure.spade_baselines import colocated, per_token_ms, pipelined, speeds
from aparte.measure.spade_run import Run

#: What paper B (SPADE) reports, for Llama-3.2-1B on an RTX 3080 drafting for Llama-3.1-8B on an RTX A6000.
PAPER = {
    "models": "draft Llama-3.2-1B (RTX 3080), target Llama-3.1-8B (RTX A6000)",
    "spec_bench": {
        CLOUD: {"cloud_calls_per_answer": 133.25, "cloud_time_ratio": 1.0, "tok_s": 2.43, "judge": 4.45},
        EDGE: {"cloud_calls_per_answer": 0.0, "cloud_time_ratio": 0.0, "tok_s": 3.91, "judge": 3.39},
        "spade": {"cloud_calls_per_answer": 30.16, "cloud_time_ratio": 0.23, "tok_s": 3.25, "judge": 4.38},
    },
    "cnn_dailymail": {
        CLOUD: {
            "cloud_calls_per_answer": 127.30, "cloud_time_ratio": 1.0, "tok_s": 1.21,
            "bleu1": 23.76, "bleu4": 7.57, "rouge1": 38.38, "rougeL": 24.32,
        },
        EDGE: {
            "cloud_calls_per_answer": 0.0, "cloud_time_ratio": 0.0, "tok_s": 2.82,
            "bleu1": 22.33, "bleu4": 6.49, "rouge1": 36.05, "rougeL": 22.49,
        },
        "spade": {
            "cloud_calls_per_answer": 30.79, "cloud_time_ratio": 0.24, "tok_s": 1.95,
            "bleu1": 23.39, "bleu4": 6.98, "rouge1": 37.99, "rougeL": 23.92,
        },
    },
}  # fmt: skip


def summarize(
    rows: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    mbps: float,
    references: Mapping[str, str],
    *,
    exact: bool,
) -> dict[str, Any]:
    """As in design section 8, and more. ``exact`` says whether the text has to be that of the cloud alone.

    Without ``references`` nothing is scored.
    """
    if not rows or not any(run["tokens"] for row in rows for run in [row["runs"][CLOUD]]):
        raise UserError("No answer has a token, so there is nothing to compare. Use other questions.")
    parts = {"all": list(rows), "summarization": [row for row in rows if row["task"] == "summarization"]}
    figures = {
        name: _tables(part, lengths, mbps, references, exact=exact) for name, part in parts.items() if part
    }
    best = min(figures["all"]["sweep"], key=lambda row: (row["cloud_calls_per_answer"], row["d"]))["d"]
    report: dict[str, Any] = {**figures["all"], "spade": _of(figures["all"], best)}
    if "summarization" in figures:
        report["summarization"] = {
            **figures["summarization"],
            "spade": _of(figures["summarization"], best),
        }
    prompts = [row["prompt"] for row in rows]
    report |= {
        "questions": len(rows),
        "cheapest_d": min(figures["all"]["sweep"], key=lambda row: (row["cloud_time_ratio"], row["d"]))["d"],
        "prompt": {key: round(sum(one[key] for one in prompts) / len(rows), 2) for key in prompts[0]},
        "different": _different(rows) if exact else [],
        "paper": PAPER,
    }
    return report


def _of(figures: dict[str, Any], length: int) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in figures["sweep"] if row["d"] == length)
    return found


def _different(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Questions with an answer that is not the cloud's own."""
    return [
        row["id"]
        for row in rows
        if any(
            run["digest"] != row["runs"][CLOUD]["digest"]
            for way, run in row["runs"].items()
            if way not in (EDGE, PLAIN)
        )
    ]


def _tables(
    rows: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    mbps: float,
    references: Mapping[str, str],
    *,
    exact: bool,
) -> dict[str, Any]:
    def runs(way: str) -> list[Run]:
        return [Run(**row["runs"][way]) for row in rows]

    def scores(way: str) -> dict[str, float]:
        scored = [row for row in rows if row["scored"]]
        if not scored or not references:
            return {}
        texts = [row["runs"][way]["text"] for row in scored]
        return score(texts, [references[row["id"]] for row in scored]).to_json()

    alone = runs(CLOUD)
    count = len(rows)
    result: dict[str, Any] = {CLOUD: _cloud_only(alone, mbps) | scores(CLOUD)}
    if EDGE in rows[0]["runs"]:
        drafts = runs(EDGE)
        tokens = sum(run.tokens for run in drafts)
        ms = sum(run.compute_ms for run in drafts)
        speed = round(1e3 * tokens / ms, 3) if ms else 0.0
        result[EDGE] = {
            "cloud_calls_per_answer": 0.0,
            "cloud_time_ratio": 0.0,
            "tok_s": {str(rtt): speed for rtt in RTTS_MS},
            "edge_ms_per_answer": round(ms / count, 2),
            "tokens_per_answer": round(tokens / count, 2),
            "identical_share": round(
                sum(one.digest == other.digest for one, other in zip(drafts, alone, strict=True)) / count, 4
            ),
            **scores(EDGE),
        }
    result["sweep"] = [
        {"d": length} | _spade(runs(str(length)), alone, mbps, exact=exact) | scores(str(length))
        for length in lengths
    ]
    if PLAIN in rows[0]["runs"]:
        ratio = per_token_ms(runs(PLAIN)) / per_token_ms(alone)
        result[PLAIN] = _cloud_only(runs(PLAIN), mbps) | {"cloud_time_ratio": round(ratio, 4)} | scores(PLAIN)
    if AUTO in rows[0]["runs"]:
        result[AUTO] = _spade(runs(AUTO), alone, mbps, exact=exact) | scores(AUTO)
    if BARE in rows[0]["runs"]:
        result["no_states"] = _spade(runs(BARE), alone, mbps, exact=exact)
    by_way = {way: runs(way) for way in rows[0]["runs"]}
    if beside := colocated(by_way, mbps, exact=exact):
        result["colocated"] = beside
    if ahead := pipelined(by_way, exact=exact):
        result["pipelined"] = ahead
    return result


def _cloud_only(runs: Sequence[Run], mbps: float) -> dict[str, Any]:
    """The cloud writes by itself: one round trip per answer, four bytes per token."""
    tokens, ms, count = sum(r.tokens for r in runs), sum(r.cloud_ms for r in runs), len(runs)
    return {
        "cloud_calls_per_answer": round(sum(run.steps for run in runs) / count, 2),
        "cloud_ms_per_answer": round(ms / count, 2),
        "cloud_time_ratio": 1.0,
        "tokens_per_answer": round(tokens / count, 2),
        "tok_s": speeds(tokens, ms, count, 4 * tokens, mbps),
    }


def _spade(runs: Sequence[Run], alone: Sequence[Run], mbps: float, *, exact: bool) -> dict[str, Any]:
    def total(name: str, of: Sequence[Run] = runs) -> float:
        return float(sum(getattr(run, name) for run in of))

    count, tokens, steps = len(runs), total("tokens"), total("steps")
    size = total("bytes_up") + total("bytes_down")
    alone_ms = per_token_ms(alone)
    judged = total("accepted") + total("rejected")
    drafted = total("drafted")
    return {
        "cloud_calls_per_answer": round(steps / count, 2),
        "call_reduction": round(1 - (steps / tokens) / (total("steps", alone) / total("tokens", alone)), 4),
        "cloud_ms_per_answer": round(total("cloud_ms") / count, 2),
        "cloud_time_ratio": round(per_token_ms(runs) / alone_ms, 4),
        "tok_s": speeds(tokens, total("compute_ms"), steps, size, mbps),
        "tokens_per_answer": round(tokens / count, 2),
        "tokens_per_call": round(tokens / steps, 4),
        "drafted_per_call": round(drafted / steps, 2),
        "acceptance": round(total("accepted") / drafted, 4) if drafted else 0.0,
        "acceptance_per_token": round(total("accepted") / judged, 4) if judged else 0.0,
        "edge_ms_per_answer": round(total("edge_ms") / count, 2),
        "edge_ms_per_draft": round(total("edge_ms") / drafted, 3) if drafted else 0.0,
        "bytes_up_per_token": round(total("bytes_up") / tokens, 1),
        "bytes_down_per_token": round(total("bytes_down") / tokens, 1),
        "bytes_states_per_token": round(total("bytes_states") / tokens, 1),
        # Below this round trip it is faster than the cloud by itself, for one user; negative is never.
        "break_even_rtt_ms": round((alone_ms * tokens - total("compute_ms")) / steps, 2),
        "identical": all(a.digest == b.digest for a, b in zip(runs, alone, strict=True)) if exact else None,
    }


def cells(report: dict[str, Any], part: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table for people; of the summaries with ``part`` ``summarization``."""
    figures = report if part is None else report[part]
    paper = PAPER["cnn_dailymail" if part else "spec_bench"]
    assert isinstance(paper, dict)
    names = ("bleu1", "bleu4", "rouge1", "rougeL")
    heads = ["", "calls", "fewer", "cloud time", *(f"tok/s {rtt} ms" for rtt in RTTS_MS)]
    heads += ["accepted", "per call", "edge ms", "bytes/token", "identical", *names]

    def line(name: str, row: dict[str, Any]) -> list[str]:
        size = row.get("bytes_up_per_token", 0) + row.get("bytes_down_per_token", 0)
        identical = row.get("identical")
        return [
            name,
            _number(row.get("cloud_calls_per_answer")),
            _percent(row.get("call_reduction")),
            _number(row.get("cloud_time_ratio")),
            *(_number(row["tok_s"][str(rtt)]) for rtt in RTTS_MS),
            _percent(row.get("acceptance")),
            _number(row.get("tokens_per_call")),
            _number(row.get("edge_ms_per_answer"), 0),
            _number(size or None, 0),
            "" if identical is None else "yes" if identical else "no",
            *(_number(row.get(score)) for score in names),
        ]

    def of_paper(name: str, way: str) -> list[str]:
        row = paper[way]
        alone = paper[CLOUD]["cloud_calls_per_answer"]
        fewer = 1 - row["cloud_calls_per_answer"] / alone if way == "spade" else None
        return [
            name,
            _number(row["cloud_calls_per_answer"]),
            _percent(fewer),
            _number(row["cloud_time_ratio"]),
            # Both models on one machine, no network: the speed stands where there is none.
            _number(row["tok_s"]),
            *[""] * (len(RTTS_MS) - 1 + 5),
            *(_number(row.get(score)) for score in names),
        ]

    rows = [line("cloud only", figures[CLOUD])]
    if PLAIN in figures:
        rows.append(line("cloud only, without --batch-invariant", figures[PLAIN]))
    if EDGE in figures:
        rows.append(line("edge only", figures[EDGE]))
    rows += [line(f"SPADE d={row['d']}", row) for row in figures["sweep"]]
    if AUTO in figures:
        rows.append(line(f"SPADE auto, {figures[AUTO]['drafted_per_call']:.1f} on average", figures[AUTO]))
    if "no_states" in figures:
        rows.append(line(f"d={report['bare_length']}, no states", figures["no_states"]))
    rows += [line(f"co-located d={row['d']}", row) for row in figures.get("colocated", ())]
    rows += [
        of_paper("paper: target", CLOUD),
        of_paper("paper: draft", EDGE),
        of_paper("paper: SPADE", "spade"),
    ]
    return heads, rows


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
