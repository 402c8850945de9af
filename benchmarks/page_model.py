"""Sections of docs/benchmarks.md on the cost model, and on other software in the same process."""

from __future__ import annotations

import statistics
from typing import Any

from page_runs import run_line


def rtt_section(found: dict[str, Any]) -> str:
    """Cross-validation of ``aparte rtt``. Empty if it was not measured."""
    if "rtt" not in found:
        return ""
    result = found["rtt"]["result"]
    limits = sorted({fold["max_nodes"] for fold in result["folds"]})
    by: dict[tuple[float, float | None], dict[int, dict[str, Any]]] = {}
    for fold in result["folds"]:
        by.setdefault((fold["rtt_ms"], fold["mbps_up"]), {})[fold["max_nodes"]] = fold
    rows = [
        [
            f"{rtt:g} ms, {'unlimited' if mbps is None else f'{mbps:g} Mbit/s'}",
            *(_fold(folds.get(limit)) for limit in limits),
        ]
        for (rtt, mbps), folds in by.items()
    ]
    for name, pick in (("median error", statistics.median), ("worst error", max)):
        errors = [
            [abs(fold["error"]) for fold in result["folds"] if fold["max_nodes"] == limit] for limit in limits
        ]
        rows.append([f"**{name}**", *(f"**{pick(some):.1%}**" for some in errors)])
    columns = ["link left out", *("sequential" if not limit else f"up to {limit} nodes" for limit in limits)]
    return (
        "## The cost model\n\n`aparte rtt` fits what steps cost to measured runs over emulated links, and predicts "
        "the others: all runs of a link are left out of the fit, then predicted. Tokens per second measured / "
        "predicted, and the error. Paper A: 1.2 to 2.4 % sequential, 4.5 to 6.2 % with lookahead, over round "
        "trips alone.\n\n"
        + _table(columns, rows)
        + f"\nAll together: median {result['median_error']:.1%}, worst {result['worst_error']:.1%}. "
        f"A step costs its round trip, {result['base_ms']:.1f} ms, {result['cooling_ms']:.1f} ms times the logarithm "
        f"of how long processors wait, {result['drafting_ms']:.1f} ms more with drafts, {result['node_ms']:.2f} ms per "
        "node, and its bytes over the bandwidth. " + run_line("rtt")
    )


def _fold(fold: dict[str, Any] | None) -> str:
    if fold is None:
        return ""
    return f"{fold['measured_tok_s']:.2f} / {fold['predicted_tok_s']:.2f} ({fold['error']:+.1%})"


def peers_section(found: dict[str, Any]) -> str:
    """Other software that wrote in the same session. Empty if none did."""
    if "peers" not in found:
        return ""
    result = found["peers"]["result"]
    prompts = list(dict.fromkeys(row["prompt"] for row in result["rows"]))
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    by = {(row["way"], row["prompt"]): row for row in result["rows"]}
    rows = [
        [
            f"**{way}**" if way.startswith("aparte") else way,
            " / ".join(f"{by[way, prompt]['tok_s']:.1f}" for prompt in prompts),
            " / ".join(f"{by[way, prompt]['tokens_per_pass']:.2f}" for prompt in prompts),
            "yes" if all(by[way, prompt]["identical"] for prompt in prompts) else "no",
        ]
        for way in ways
    ]
    other = result["llama_cpp"]
    if other["run"]:
        speeds = {row["prompt"]: row["tok_s"] for row in other["rows"]}
        label = f"llama.cpp RPC on loopback, {other['model']}, prompt left out"
        rows.append([label, " / ".join(f"{speeds[prompt]:.1f}" for prompt in prompts), "", ""])
        said = ""
    else:
        said = f"llama.cpp's RPC backend was not run: {other['reason']}. "
    columns = ["", "tok/s: " + " / ".join(prompts), "tokens per pass", "tokens of `generate`"]
    return (
        "## In the same process\n\nHugging Face's own speculation beside ours: one process, no link, the same "
        f"prompts, weights, precision and {result['threads']} threads, {result['new_tokens']} greedy tokens, prompt "
        f"included, medians of {result['repeats']} in rotating order. Prompt lookup proposes up to ten tokens that "
        "followed the same words before; the assistant is the model's own first layers, as no smaller model of the "
        "family ships with a package. A pass is a forward pass of the whole model, or a round trip.\n\n"
        + _table(columns, rows)
        + f"\n{said}{run_line('peers')}"
    )


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
