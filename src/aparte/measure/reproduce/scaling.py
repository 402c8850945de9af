"""Scaling and memory: what larger models need and bring, from their configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aparte.measure.plan import Plan, Question
from aparte.measure.plot_file import STYLES
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import Lab
from aparte.measure.reproduce.section import Figure, Table, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "scaling"
TITLE = "Scaling and memory"
PAPER = "paper-a"
WHAT = (
    "What `aparte plan` works out from each model's configuration at cut 2,2 and 80 ms: nothing is measured here. For "
    "the 7B and the 12B model it uses the paper's own overheads, for the larger ones 0.32 ms per layer and the time to "
    "read its weights once from an A100's memory, as if one such memory held them."
)


def run(lab: Lab) -> dict[str, Any]:
    rows = {}
    for name in lab.counted("scaling", list(paper_a.SCALING)):
        made = Plan(Question(name)).to_json()
        at_80 = next(row for row in made["projections"] if row["rtt_ms"] == 80)
        rows[name] = {
            "device_weights_gb": made["device"]["weights_gb"],
            "device_gb": made["device_gb"],
            "cloud_gb": made["cloud_gb"],
            "bytes_per_token": made["bytes_per_token"],
            "cloud_ms": made["step_ms"]["cloud"],
            "rtt_to_compute": made["rtt_to_compute"],
            "sequential_tok_s": at_80["sequential_tok_s"],
            "auto_tok_s": at_80["auto_tok_s"],
        }
    return {"rows": rows, "rtt_ms": 80}


def tables(found: dict[str, Any]) -> list[Table]:
    table: Table = [
        ["paper A / here", "KB per token", "cloud, ms", "round trip to compute", "sequential tok/s"]
        + ["device, GB of weights", "cloud, GB", "tok/s with `auto`"]
    ]
    for name, said in paper_a.SCALING.items():
        row = found["rows"][name]
        here = (
            f"{row['bytes_per_token'] / 1024:g}",
            number(row["cloud_ms"]),
            number(row["rtt_to_compute"], 2),
            number(row["sequential_tok_s"]),
            number(row["device_weights_gb"], 2),
        )
        table.append(
            [name, *(f"{one} / {two}" for one, two in zip(said, here, strict=True))]
            + [number(row["cloud_gb"]), number(row["auto_tok_s"])]
        )
    return [table]


def figures(found: dict[str, Any]) -> list[Figure]:
    def draw(axes: Axes) -> None:
        names = list(found["rows"])
        for offset, (key, label) in enumerate(
            (("sequential_tok_s", "sequential"), ("auto_tok_s", "with `auto`'s drafts"))
        ):
            places = [place + 0.4 * (offset - 0.5) for place in range(len(names))]
            values = [found["rows"][name][key] for name in names]
            label = label.replace("`", "")
            bars = axes.bar(places, values, width=0.38, color=STYLES[offset][0], label=label)
            axes.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=8)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("tokens per second at 80 ms, planned")

    return [Figure("scaling", "Split speed by size of the model", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    return [
        f"Device weights: {rows['mistral-nemo-12b']['device_weights_gb']:.2f} GB for NeMo 12B (paper A: 4.9 measured), "
        f"{rows['mistral-7b']['device_weights_gb']:.2f} GB for the 7B (2.0 measured).",
        "The 7B's embedding and LM head are separate matrices of 0.27 GB, of which the paper's figure has room for one "
        "only; ours counts both, as its own 12B figure does.",
        "The paper estimates ranges for 70B and 405B; ours come from memory bandwidth and ignore that such a model needs "
        "several GPUs, whose links add time.",
    ]
