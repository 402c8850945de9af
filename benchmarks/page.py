"""Write docs/benchmarks.md from the results of benchmarks/suite.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_model import peers_section, rtt_section
from page_parts import contexts_section, formats_section, memory_section
from page_runs import run_line, runs_section
from page_spade import spade_section

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"

INTRO = """# Benchmarks

Written by `benchmarks/suite.py`; do not edit. Every row or table names its [run](#runs). Device, cloud and emulated
link run on one machine whose cores they share, so read ratios within a row rather than absolute numbers. The
questions are [Spec-Bench](https://github.com/hemingkx/Spec-Bench), a subset balanced over its six tasks, drawn by
seed 0; the macro average counts each task the same. *Cold*: every question starts with nothing learned. *Warm*: what
the drafter learned from earlier questions is kept. All text is greedy. MAT is tokens committed per round trip,
the target's own included.
"""

TARGETS = (
    ("free-16", "training-free, at most 16 nodes, cold", "1.21–1.25", "2.2", "2.6"),
    ("common-16", "the same with the table that ships, cold", "", "", ""),
    ("free-32-warm", "training-free, at most 32 nodes, warm", "", "2.6", "3.0"),
    ("bridge-24", "with the bridge, at most 24 nodes, 80 ms, cold", "", "2.6", "3.5"),
)
SPEEDS = (
    ("link-80", "80 ms, 100 Mbit/s, `auto`", "1.12x", "1.8x", "3x"),
    ("link-80-single", "the same, one step at a time (`--in-flight 1`)", "", "", ""),
    ("link-150", "150 ms, 100 Mbit/s, `auto`", "", "2.1x", "3.5x"),
)
#: Tokens per second of other systems on a machine of the same kind, single runs, ± 30 %: by prompt and
#: round trip in ms. Measured with the same model before this page existed, with prompts of the same kinds
#: and lengths; they can't be rerun from this repository.
RIVALS: dict[str, dict[float, tuple[float, float, float]]] = {
    "llama.cpp RPC, all layers remote, 4-bit": {20: (21, 19, 18), 80: (9.8, 7.4, 7.4), 150: (5.7, 5.5, 5.3)},
    "the same with n-gram speculation, tuned": {20: (24, 20, 42), 80: (8.6, 9.1, 9.4), 150: (5.3, 6.0, 20)},
    "llama.cpp as a U-shaped split, n-gram speculation": {
        20: (13, 13, 34),
        80: (9.1, 8.1, 7.3),
        150: (5.9, 5.4, 19),
    },
    "paper A's prototype, sequential, float32": {
        20: (6.3, 4.4, 5.0),
        80: (4.5, 4.5, 2.1),
        150: (3.5, 3.5, 3.4),
    },
    "paper A's prototype, lookahead": {20: (4.3, 5.4, 8.4), 80: (3.7, 4.0, 11.5), 150: (4.3, 3.7, 9.7)},
    "Petals, two servers of one owner": {20: (4.2, 4.1, 3.5), 80: (2.8, 2.8, 2.4), 150: (1.9, 1.9, 1.7)},
}
PROMPTS = ("code", "chat", "summary")


def write_page(results: Path) -> None:
    """Write the page from whatever results there are; measurements that are missing have no rows."""
    found = read_runs(results)
    sections = (
        _mat,
        _speed,
        _links,
        peers_section,
        _budget,
        rtt_section,
        spade_section,
        _step,
        formats_section,
        contexts_section,
        memory_section,
        runs_section,
    )
    parts = [INTRO, *(section(found) for section in sections)]
    PAGE.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def read_runs(results: Path) -> dict[str, Any]:
    """What benchmarks/suite.py ran, by name; files of other scripts in the folder are not for this page."""
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*.json")}
    return {name: entry for name, entry in read.items() if isinstance(entry, dict) and "command" in entry}


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _mat(found: dict[str, Any]) -> str:
    rows, tasks = [], []
    for name, label, paper, must, aim in TARGETS:
        if name in found:
            result = found[name]["result"]
            macro, categories = result["macro"], result["categories"]
            tasks = list(categories)
            rows.append(
                [label, paper, must, aim, f"**{macro['mat']:.2f}**", f"{macro['nodes_per_step']:.1f}"]
                + [f"{categories[task]['mat']:.2f}" for task in tasks]
                + [f"`{name}`"]
            )
    if not rows:
        return ""
    columns = ["", "paper A", "wanted", "hoped for", "MAT, macro average", "nodes per step", *tasks, "run"]
    return "## Tokens per round trip\n\n" + _table(columns, rows)


def _speed(found: dict[str, Any]) -> str:
    rows, tasks = [], []
    for name, label, paper, must, aim in SPEEDS:
        if name in found:
            result = found[name]["result"]
            macro, categories = result["macro"], result["categories"]
            tasks = list(categories)
            rows.append(
                [label, paper, must, aim, f"**{macro['speedup']:.2f}x**"]
                + [f"{macro['tok_s']:.1f} / {macro['sequential_tok_s']:.1f}", f"{macro['mat']:.2f}"]
                + [f"{macro['nodes_per_step']:.1f}", "yes" if result["identical"] else "no"]
                + [f"{categories[task]['speedup']:.2f}x" for task in tasks]
                + [f"`{name}`"]
            )
    if not rows:
        return ""
    columns = ["", "paper A", "wanted", "hoped for", "tok/s over sequential", "tok/s", "MAT", "nodes"]
    return (
        "## Speed over a link\n\nEach question is answered sequentially and by `auto`, one after the other; "
        "tok/s end to end, prompt included, `auto` / sequential. *Identical*: every answer has the same "
        "tokens both ways.\n\n" + _table([*columns, "identical", *tasks, "run"], rows)
    )


def _links(found: dict[str, Any]) -> str:
    if "links" not in found:
        return ""
    rows = found["links"]["result"]["rows"]
    rtts = sorted({row["rtt_ms"] for row in rows})
    by = {(row["rtt_ms"], row["prompt"]): row for row in rows}
    columns = ["", "round trips per token", *(f"{rtt:g} ms" for rtt in rtts)]

    def own(mode: str) -> list[str]:
        trips = [by[rtts[-1], prompt][mode]["round_trips_per_token"] for prompt in PROMPTS]
        speeds = [" / ".join(f"{by[rtt, prompt][mode]['tok_s']:.1f}" for prompt in PROMPTS) for rtt in rtts]
        return [f"**aparte, {mode}**", " / ".join(f"{trip:.2f}" for trip in trips), *speeds]

    table = [own("auto"), own("sequential")]
    best: dict[float, list[float]] = {}
    for name, figures in RIVALS.items():
        table.append([name, "", *(" / ".join(f"{value:g}" for value in figures[rtt]) for rtt in rtts)])
        for rtt in rtts:
            before = best.get(rtt, [0.0, 0.0, 0.0])
            best[rtt] = [max(pair) for pair in zip(before, figures[rtt], strict=True)]
    ratios = [
        " / ".join(
            f"{by[rtt, prompt]['auto']['tok_s'] / best[rtt][index]:.2f}x"
            for index, prompt in enumerate(PROMPTS)
        )
        for rtt in rtts
    ]
    table.append(["`auto` over the best of the others", "", *ratios])
    identical = "yes" if all(row["identical"] for row in rows) else "no"
    return (
        "## Beside other systems\n\nTokens per second end to end for 128 greedy tokens on three prompts: a "
        "function with its explanation / a factual question / a passage to summarise and repeat. The figures "
        "of the other systems are single runs, ± 30 %, on a machine of the same kind with the same model and "
        "link emulator and prompts of the same kinds and lengths, not run again for this page. Only `aparte`, "
        "paper A's prototype and the U-shaped arrangement keep both ends of the model on the device. Same "
        f"tokens with `auto` as sequentially: {identical}.\n\n"
        + _table(columns, table)
        + "\n"
        + run_line("links")
    )


def _budget(found: dict[str, Any]) -> str:
    if "budget" not in found:
        return ""
    result = found["budget"]["result"]
    budgets = list(result["rows"][0]["budgets"])
    table = [
        [
            f"{row['rtt_ms']:g} ms, {row['mbps']:g} Mbit/s",
            *(f"{row['budgets'][budget]:.1f}" for budget in budgets),
            f"{row['automatic']:.1f}",
            f"{row['automatic_nodes']:.1f}",
            f"{row['regret']:+.1%}",
        ]
        for row in result["rows"]
    ]
    columns = ["link", *(f"{budget} nodes" for budget in budgets), "automatic", "its nodes", "regret"]
    plot = "\n![MAT and tokens per second by node budget](img/budget.svg)\n"
    return (
        "## Node budget\n\nTokens per second with a fixed number of speculative nodes per round trip, and "
        "with the automatic one. *Regret* is what automatic loses against the best fixed number; below zero it "
        "is ahead of all. Model, trees and acceptance are real and timed; the link is simulated: its round "
        "trip and the messages' bytes over its bandwidth are added to each step's measured time. Fixed numbers "
        "are measured once per question and round trip and replayed at its other bandwidths. Without "
        "the prompt and without pipelining.\n\n"
        + _table(columns, table)
        + "\n"
        + run_line("budget")
        + (plot if (PAGE.parent / "img" / "budget.svg").exists() else "")
    )


def _step(found: dict[str, Any]) -> str:
    if "step" not in found:
        return ""
    result = found["step"]["result"]
    rows = [
        [
            f"{row['nodes']}",
            *(
                f"{row[key]:.1f}"
                for key in ("middle_ms", "device_ms", "simple_middle_ms", "simple_device_ms")
            ),
            f"{row['transformers_ms']:.1f}",
        ]
        for row in result["rows"]
    ]
    columns = [
        "nodes",
        "middle",
        "device",
        "middle, simple path",
        "device, simple path",
        "transformers, whole",
    ]
    return (
        "## Cost of a step\n\nMilliseconds of compute for a step of so many nodes, 300 tokens in the cache, "
        "medians in one process: the 26 middle layers, and front, back and head. *Simple path*: without joined "
        "linears and shared attention heads. The last column is the unsplit model as `transformers` runs it in "
        "float32.\n\n" + _table(columns, rows) + "\n" + run_line("step")
    )
