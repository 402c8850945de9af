"""Sections of docs/benchmarks.md on number formats: what a step costs in each, and what its parts take."""

from __future__ import annotations

from typing import Any

from page_runs import run_line

#: Runs of ``bench step`` and what they show.
STEPS = {
    "step": "`packed16`",
    "step-int8": "`int8`",
    "step-int8-kv8": "`int8`, `--kv int8`",
    "step-bf16": "`bfloat16`",
    "step-invariant": "`packed16`, `--batch-invariant`",
    "step-int8-invariant": "`int8`, `--batch-invariant`",
    "step-bf16-invariant": "`bfloat16`, `--batch-invariant`",
    "step-kv8": "`packed16`, `--kv int8`",
}


def formats_section(found: dict[str, Any]) -> str:
    """Steps by ``--dtype`` and what goes with it. Empty if only the default was measured."""
    runs = {name: label for name, label in STEPS.items() if name in found}
    if len(runs) < 2:
        return ""
    nodes = [row["nodes"] for row in found["step"]["result"]["rows"]]
    rows = []
    for name, label in runs.items():
        result = found[name]["result"]
        steps = {row["nodes"]: row["middle_ms"] + row["device_ms"] for row in result["rows"]}
        longer = {row["context"]: row["over_shortest"] for row in result["contexts"]}
        stock = {row["nodes"]: row["transformers_ms"] for row in result["rows"]}
        rows.append(
            [
                label,
                *(f"{steps[count]:.1f} ({steps[count] / stock[count]:.2f}x)" for count in nodes),
                f"{result['window_8_over_1']:.2f}x",
                f"{longer[4096]:.2f}x" if 4096 in longer else "",
                found[name]["machine"].rpartition(", ")[0],
                f"[`{name}`](#runs)",
            ]
        )
    columns = [
        "",
        *(f"{count} nodes" for count in nodes),
        "8 over 1",
        "4096 over 256 tokens",
        "machine",
        "run",
    ]
    return (
        "## Cost of a step by number format\n\nBoth sides together, in milliseconds, and in relation to the unsplit "
        "model as `transformers` runs it in float32 in the same run. *8 over 1*: a step of eight nodes over one of "
        "one. *4096 over 256 tokens*: the same for a step of one node that sees so many. Compare milliseconds of one "
        "machine only.\n\n" + _table(columns, rows)
    )


def contexts_section(found: dict[str, Any]) -> str:
    """A step of one node by the length of the text. Empty if it was not measured."""
    runs = {
        name: label
        for name, label in STEPS.items()
        if name in found and found[name]["result"].get("contexts")
    }
    if not runs:
        return ""
    rows = [
        [
            label,
            str(row["context"]),
            *(f"{row[name]:.1f}" for name in ("middle_ms", "device_ms")),
            f"{row['middle_ms'] + row['device_ms']:.1f}",
            f"{row['over_shortest']:.2f}x",
            f"[`{name}`](#runs)",
        ]
        for name, label in runs.items()
        for row in found[name]["result"]["contexts"]
    ]
    columns = ["", "tokens", "middle", "device", "both", "over the shortest", "run"]
    return (
        "## Cost of a step by length of text\n\nMilliseconds for a step of one node that sees so many tokens, "
        "itself included; the text before it was read in chunks of 256 tokens.\n\n" + _table(columns, rows)
    )


def memory_section(found: dict[str, Any]) -> str:
    """What parts take. Empty if it was not measured."""
    if "memory" not in found:
        return ""
    rows = [
        [
            f"{row['part']}, `{row['dtype']}`",
            *(f"{row[name] / 1e6:.0f}" for name in ("tensors", "peak", "held", "runtime")),
            f"{row['peak_over_tensors']:.2f}x",
            f"{row['held_over_tensors']:.2f}x",
        ]
        for row in found["memory"]["result"]["rows"]
    ]
    columns = [
        "part",
        "tensors",
        "peak",
        "held",
        "of these runtime",
        "peak over tensors",
        "held over tensors",
    ]
    return (
        "## Memory of the parts\n\nMB of a process that loads one part: its tensors in the numbers and the layout "
        "that it computes with (packed matrices are padded to inputs of a multiple of 512, and the default model "
        "has 576), the most it had while loading, what it has afterwards, and what it had before. Relations are "
        "without the runtime. In float32 from a float32 checkpoint weights stay in the mapped file, which is not "
        "counted.\n\n" + _table(columns, rows) + "\n" + run_line("memory")
    )


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
