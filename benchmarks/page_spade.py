"""The section of docs/benchmarks.md on draft mode, with paper B's figures beside ours."""

from __future__ import annotations

from typing import Any

from aparte.measure.spade_baselines import pipelined_cells

SHAPES = (
    ("spade", "trees of `d` nodes, which greedy text gets by default"),
    ("spade-chain", "chains of `d` tokens"),
    ("spade-int8", "trees of `d` nodes, both sides with `--dtype int8`, against the cloud alone with it"),
    (
        "spade-bf16",
        "the same with `--dtype bfloat16`, on a processor with AMX, whose near-ties fall either way",
    ),
    (
        "spade-bf16-invariant",
        "the same with `--dtype bfloat16 --batch-invariant`, against the cloud alone with both",
    ),
    (
        "spade-drawn",
        "drawn trees of `d` nodes, rejection sampling at temperature 0.8, against the same alone",
    ),
)
RTTS = ("0", "20", "80", "150")
SCORES = ("bleu1", "bleu4", "rouge1", "rougeL")
SPEC, CNN = "spec_bench", "cnn_dailymail"


def spade_section(found: dict[str, Any]) -> str:
    """Empty if draft mode was not measured."""
    shapes = [(found[name]["result"], label) for name, label in SHAPES if name in found]
    if not shapes:
        return ""
    first = shapes[0][0]
    paper = first["paper"]
    parts = [
        "## Draft mode (SPADE)\n\nHere the cloud sees the text ([draft mode](draft.md)). *Calls* are round trips "
        "per answer, *cloud time* is compute on the cloud per token, cloud only being 1, both without reading the "
        "prompt. Tokens per second at a round trip of 0 / 20 / 80 / 150 ms: compute was measured, the link's round "
        f"trips and bytes at {first['mbps']:g} Mbit/s are added by arithmetic. Device and cloud are the same two "
        f"CPU cores here, where a pass over more tokens costs more. No GPU was measured. The paper: "
        f"{paper['models']}; `smollm2-135m` here, drafting with {_names(first['draft'])}. The paper's summaries "
        "are CNN/DailyMail; ours are the 80 of Spec-Bench that come from it, those among the questions drawn.\n",
        _table(first, paper[SPEC], shapes),
    ]
    ahead = [(result["pipelined"], label) for result, label in shapes if "pipelined" in result]
    if ahead:
        parts.append(
            "Drafting on while a block is being verified, against one block at a time. Device and cloud count as "
            "computing at the same time; blocks by answer, those sent for nothing in the cloud's time:\n"
        )
        parts.append(_pipelined(ahead))
    summaries = [(result["summarization"], label) for result, label in shapes if "summarization" in result]
    if summaries and any("bleu1" in result["cloud_only"] for result, _ in summaries):
        parts.append("Summaries, scored against their references:\n")
        parts.append(_scores(summaries, paper[CNN]))
    parts.append(_notes(first))
    parts.append(f"Runs: {', '.join(f'[`{name}`](#runs)' for name, _ in SHAPES if name in found)}.\n")
    return "\n".join(parts) + "\n![Calls, cloud time and speed by d](img/spade.svg)\n"


def _table(first: dict[str, Any], paper: dict[str, Any], shapes: list[tuple[dict[str, Any], str]]) -> str:
    columns = ["", "calls", "fewer", "cloud time", "tok/s", "tokens per call", "accepted", "bytes per token"]
    rows = [
        _paper_row("paper, cloud only", paper["cloud_only"], None),
        _paper_row("paper, edge only", paper["edge_only"], None),
        _paper_row("paper, SPADE", paper["spade"], paper["cloud_only"]),
        [
            "cloud only",
            _calls(first["cloud_only"]),
            "",
            "1",
            _speeds(first["cloud_only"]),
            "1.00",
            "",
            "",
            "",
        ],
    ]
    if "edge_only" in first:
        rows.append(["edge only", "0", "", "0", _speeds(first["edge_only"]), "", "", "", ""])
    for result, label in shapes:
        rows.append([f"*{label}*", *[""] * 8])
        if "cloud_only_plain" in result:
            row = result["cloud_only_plain"]
            times = [f"{row['cloud_time_ratio']:.2f}", _speeds(row), "1.00", *[""] * 3]
            rows.append(["cloud only, without `--batch-invariant`", _calls(row), "", *times])
        rows += [_row(f"d = {row['d']}", row) for row in result["sweep"]]
        if "automatic" in result:
            row = result["automatic"]
            rows.append(_row(f"auto, {row['drafted_per_call']:.1f} nodes on average", row))
        rows += [_row(f"d = {row['d']}, drafter on the cloud", row) for row in result.get("colocated", ())]
    return _markdown([*columns, "identical"], rows)


def _row(label: str, row: dict[str, Any]) -> list[str]:
    # With the drafter on the cloud only the text crosses, four bytes for a token.
    size = row["bytes_up_per_token"] + row["bytes_down_per_token"] if "bytes_up_per_token" in row else 4
    return [
        label,
        _calls(row),
        f"{row['call_reduction']:.1%}",
        f"{row['cloud_time_ratio']:.2f}",
        _speeds(row),
        f"{row['tokens_per_call']:.2f}",
        f"{row['acceptance']:.1%}",
        f"{size:,.0f}",
        _yes(row["identical"]),
    ]


def _pipelined(shapes: list[tuple[list[dict[str, Any]], str]]) -> str:
    rows: list[list[str]] = []
    for measured, label in shapes:
        columns, cells = pipelined_cells(measured)
        rows += [[f"*{label}*", *[""] * (len(columns) - 1)], *cells]
    return _markdown(["", *columns[1:]], rows)


def _scores(summaries: list[tuple[dict[str, Any], str]], paper: dict[str, Any]) -> str:
    columns = ["", "calls", "BLEU-1", "BLEU-4", "ROUGE-1", "ROUGE-L", "identical"]

    def line(label: str, row: dict[str, Any], calls: str, same: str) -> list[str]:
        return [label, calls, *(f"{row[name]:.2f}" if name in row else "" for name in SCORES), same]

    rows = [
        line(f"paper, {label}", paper[way], f"{paper[way]['cloud_calls_per_answer']:.2f}", "")
        for way, label in (("cloud_only", "cloud only"), ("edge_only", "edge only"), ("spade", "SPADE"))
    ]
    first = summaries[0][0]
    rows.append(line("cloud only", first["cloud_only"], _calls(first["cloud_only"]), ""))
    if "edge_only" in first:
        rows.append(line("edge only", first["edge_only"], "0", ""))
    for result, label in summaries:
        best = result["spade"]
        rows.append(line(f"{label}, d = {best['d']}", best, _calls(best), _yes(best["identical"])))
    return _markdown(columns, rows)


def _notes(result: dict[str, Any]) -> str:
    lines = [f"Weights on the edge: {result['edge_memory_share']:.1%} of the whole model."]
    bare = result.get("no_states")
    if bare:
        with_states = next(row for row in result["sweep"] if row["d"] == result["bare_length"])
        lines.append(
            f"Without the states that the verifier returns, d = {result['bare_length']} gets "
            f"{bare['tokens_per_call']:.2f} tokens per call instead of {with_states['tokens_per_call']:.2f}; they "
            f"are {with_states['bytes_states_per_token']:,.0f} bytes per token."
        )
    best = result["spade"]
    limit = best["break_even_rtt_ms"]
    lines.append(
        f"At d = {best['d']} drafting on the edge is faster than the cloud by itself, for one user, below a round "
        f"trip of {limit:.0f} ms; the cloud by itself needs one round trip per answer."
        if limit > 0
        else f"For one user the cloud by itself, with one round trip per answer, is faster than d = {best['d']} at "
        "any round trip: what draft mode saves is cloud calls."
    )
    return " ".join(lines) + "\n"


def _paper_row(label: str, row: dict[str, Any], alone: dict[str, Any] | None) -> list[str]:
    calls = row["cloud_calls_per_answer"]
    fewer = "" if alone is None else f"{1 - calls / alone['cloud_calls_per_answer']:.1%}"
    return [
        label,
        f"{calls:.2f}",
        fewer,
        f"{row['cloud_time_ratio']:g}",
        f"{row['tok_s']:.2f}",
        "",
        "",
        "",
        "",
    ]


def _calls(row: dict[str, Any]) -> str:
    return f"{row['cloud_calls_per_answer']:.1f}"


def _speeds(row: dict[str, Any]) -> str:
    return " / ".join(f"{row['tok_s'][rtt]:.1f}" for rtt in RTTS)


def _names(draft: str) -> str:
    return ", ".join(f"`{name}`" for name in draft.split("+"))


def _yes(identical: bool | None) -> str:
    return "" if identical is None else "yes" if identical else "no"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
