"""Inversion by depth: paper A's MLP on the states that the device sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aparte.config import Cut
from aparte.measure.plot_file import STYLES
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import Lab
from aparte.measure.reproduce.section import Figure, Table
from aparte.privacy.mlp import PAPER_SAMPLES
from aparte.report import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "inversion"
TITLE = "Inversion by depth"
PAPER = "paper-a"
WHAT = (
    f"Paper A's inverter from `aparte audit`: three layers from one hidden state to its token, on {PAPER_SAMPLES} "
    "samples as in the paper and on more, at 2, 4, 6 and 8 layers before the middle. Texts are either attacked or "
    "known to the attacker, never both."
)


def run(lab: Lab) -> dict[str, Any]:
    from aparte.privacy.audit import Audit
    from aparte.privacy.settings import AuditSettings

    settings, scale = lab.settings, lab.scale
    layers = lab.blueprint.layers
    cuts = tuple(Cut(front, 2) for front in paper_a.INVERSION if front + 2 < layers) or (Cut(1, 1),)
    audited = AuditSettings(
        settings.model,
        cuts=cuts,
        attacks=("mlp", "uniform"),
        defences=("none",),
        attacker_tokens=scale.attacker_tokens,
        quick=scale.audit_quick,
        seed=settings.seed,
    )
    # Not run_audit(): what one weak attack finds must not stand as this model's verdict.
    with torch.no_grad():
        found = Audit(lab.blueprint, audited, lab.folder / KEY, lab.progress).run()
    rows = [
        {key: row[key] for key in ("name", "cut", "top1", "top5", "attacker_tokens", "tokens")}
        for row in found["attacks"]
    ]
    return {"rows": rows, "text": found["text"], "victims": found["victims"], "layers": layers}


def _by_front(found: dict[str, Any], *, paper: bool) -> dict[int, dict[str, Any]]:
    """MLP rows by layers before the middle, at the paper's number of samples or at more."""
    return {
        int(row["cut"].split(",")[0]): row
        for row in found["rows"]
        if row["name"] == "mlp" and (row["attacker_tokens"] <= PAPER_SAMPLES) == paper
    }


def tables(found: dict[str, Any]) -> list[Table]:
    few, many = _by_front(found, paper=True), _by_front(found, paper=False)
    table: Table = [
        ["layers before the middle", "paper A, top-1", "paper A, top-5"]
        + ["here, top-1", "here, top-5", "here with more text, top-1", "its tokens"]
    ]
    for front in sorted({*paper_a.INVERSION, *few}):
        said = paper_a.INVERSION.get(front, (None, None))
        mine, more = few.get(front, {}), many.get(front, {})
        table.append(
            [
                f"{front}",
                *map(percent, said),
                percent(mine.get("top1")),
                percent(mine.get("top5")),
                percent(more.get("top1")),
                f"{more['attacker_tokens']:,}" if more else "",
            ]
        )
    uniform = next((row for row in found["rows"] if row["name"] == "uniform"), None)
    if uniform:
        table.append(["guessing", "0.003 %", "0.016 %", percent(uniform["top1"]), "", "", ""])
    return [table]


def figures(found: dict[str, Any]) -> list[Figure]:
    def draw(axes: Axes) -> None:
        fronts = sorted(paper_a.INVERSION)
        axes.errorbar(
            fronts,
            [100 * paper_a.INVERSION[front][0] for front in fronts],
            yerr=10,
            linestyle="--",
            color=STYLES[1][0],
            marker=STYLES[1][1],
            capsize=3,
            label="paper A, top-1, ± 10",
        )
        for style, (paper, label) in (
            (0, (True, f"here, {PAPER_SAMPLES} samples")),
            (2, (False, "here, more")),
        ):
            rows = _by_front(found, paper=paper)
            if rows:
                colour, marker = STYLES[style]
                places = sorted(rows)
                axes.plot(
                    places,
                    [100 * rows[front]["top1"] for front in places],
                    color=colour,
                    marker=marker,
                    label=label,
                )
        axes.set_xlabel("layers on the device before the middle")
        axes.set_ylabel("prompt tokens recovered, %")
        axes.set_ylim(0, 103)

    return [Figure("inversion", "Paper A's inverter by depth", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    few, many = _by_front(found, paper=True), _by_front(found, paper=False)
    fronts = sorted(few)
    says = [
        f"With the paper's {PAPER_SAMPLES} samples the MLP recovers {percent(few[fronts[0]]['top1'])} of the tokens at "
        f"{fronts[0]} layers and {percent(few[fronts[-1]]['top1'])} at {fronts[-1]} (paper A: 58.8 % and 34.8 %)."
    ]
    if many:
        near, far = min(many), max(many)
        more = (
            f"With {many[near]['attacker_tokens']:,} tokens of own text it recovers {percent(many[near]['top1'])} at "
            f"{near} layers"
        )
        if far != near:
            more += f" and {percent(many[far]['top1'])} at {far}"
        gained = many[near]["top1"] > few[near]["top1"] if near in few else False
        says.append(
            f"{more}: with {PAPER_SAMPLES} samples the attacker has little data."
            if gained
            else f"{more}, which is no more than with {PAPER_SAMPLES} samples."
        )
    says.append(
        "Here attacked texts and known texts share no sentence; the paper's 221 test samples come from the texts "
        "trained on."
    )
    says.append(
        "An attacker with the public weights needs no training and recovers far more at any depth: docs/privacy.md. "
        "Depth is no protection."
    )
    return says
