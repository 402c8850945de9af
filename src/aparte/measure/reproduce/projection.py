"""Projections: a cost model fitted to measured runs, checked on links it has not seen, at the paper's round trips."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from aparte.measure import prompts as built_in
from aparte.measure.plot_file import STYLES
from aparte.measure.prompts import digest
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import Lab
from aparte.measure.reproduce.section import Figure, Table, number
from aparte.measure.rtt_report import RttReport, parse_grid
from aparte.measure.rtt_runs import Device, Plan, Reach, emulated, measure
from aparte.measure.wan_link import WanProfile
from aparte.report import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "projection"
TITLE = "Projection to other round trips"
PAPER = "paper-a"
WHAT = (
    "What `aparte rtt` does: answers over emulated links, one after the other, sequential and with up to 16 "
    "speculative nodes; the cost model is fitted to all of them and projected. For cross-validation each link is "
    "left out of the fit and predicted. Paper A's model has the round trip and a constant; ours also has the bytes, "
    "nodes, and processors that cool down while they wait."
)
LIMITS = (0, 16)
MBPS = 100.0


def run(lab: Lab) -> dict[str, Any]:
    settings, scale = lab.settings, lab.scale
    texts = built_in.PROMPTS[: scale.grid_prompts]
    device = Device(lab.blueprint, settings.model, settings.cut, Reach(), lab.progress)
    plan = Plan(
        [tuple(lab.codec.encode_chat([{"role": "user", "content": text}])) for text in texts],
        LIMITS,
        max_new_tokens=scale.grid_tokens,
        repeats=scale.grid_repeats,
    )
    profiles = parse_grid(scale.grid, "grid")
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(
            emulated(device, settings.model, settings.cut, settings.compute, profiles, lab.progress)
        )
        measured = measure(places, plan, lambda done, total: lab.progress("projection", done, total))
        report = RttReport(
            places,
            measured,
            cut=settings.cut,
            layers=lab.blueprint.layers,
            device_layer_ms=device.layer_ms(),
            seed=settings.seed,
        )
        targets = [WanProfile(rtt_ms=rtt, mbps=MBPS) for rtt in paper_a.PROJECTION]
        rows = report.projections(targets, [settings.cut], LIMITS)
    kept = ("median_error", "worst_error", "folds", "base_ms", "cooling_ms", "drafting_ms", "node_ms")
    whole = report.to_json()
    return {
        **{key: whole[key] for key in (*kept, "fixed_ms", "acceptance")},
        "grid": scale.grid,
        "mbps": MBPS,
        "projections": rows,
        "prompts": digest(list(texts)),
    }


def tables(found: dict[str, Any]) -> list[Table]:
    by = {(row["rtt_ms"], row["max_nodes"]): row for row in found["projections"]}
    table: Table = [
        ["round trip, ms", "7B seq.", "7B lookahead", "12B seq.", "12B lookahead"]
        + ["here, sequential", "here, speculative", "nine of ten within"]
    ]
    for rtt, said in paper_a.PROJECTION.items():
        plain, drafted = by[rtt, 0], by[rtt, LIMITS[1]]
        table.append(
            [
                f"{rtt}",
                *(number(value) for value in said),
                number(plain["tok_s"]),
                number(drafted["tok_s"]),
                f"{drafted['low']:.1f} to {drafted['high']:.1f}",
            ]
        )
    folds: Table = [["left out: ms, Mbit/s", "nodes", "measured tok/s", "predicted", "error"]]
    for fold in found["folds"]:
        folds.append(
            [
                f"{fold['rtt_ms']:g}, {fold['mbps_up']:g}",
                str(fold["max_nodes"]),
                number(fold["measured_tok_s"], 2),
                number(fold["predicted_tok_s"], 2),
                f"{fold['error']:+.1%}",
            ]
        )
    return [table, folds]


def figures(found: dict[str, Any]) -> list[Figure]:
    def draw(axes: Axes) -> None:
        rtts = list(paper_a.PROJECTION)
        for column, label, style in ((0, "paper A, 7B sequential", 1), (1, "paper A, 7B lookahead", 3)):
            values = [paper_a.PROJECTION[rtt][column] for rtt in rtts]
            colour, marker = STYLES[style]
            axes.plot(rtts, values, "--", color=colour, marker=marker, markersize=4, label=label)  # type: ignore[arg-type]
        for limit, label, style in ((0, "here, sequential", 0), (LIMITS[1], "here, speculative", 2)):
            rows = [row for row in found["projections"] if row["max_nodes"] == limit]
            colour, marker = STYLES[style]
            axes.plot(rtts, [row["tok_s"] for row in rows], color=colour, label=label)
            low, high = [row["low"] for row in rows], [row["high"] for row in rows]
            axes.fill_between(rtts, low, high, color=colour, alpha=0.15, linewidth=0)
            seen = [fold for fold in found["folds"] if fold["max_nodes"] == limit]
            axes.plot(
                [fold["rtt_ms"] for fold in seen],
                [fold["measured_tok_s"] for fold in seen],
                linestyle="none",
                color=colour,
                marker=marker,
                label=f"{label.removeprefix('here, ')}, measured",
            )
        axes.set_xlabel("round trip, ms")
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)

    return [Figure("projection", "Projected speed by round trip; bands hold nine of ten", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    errors = "there was nothing to leave out"
    if found["median_error"] is not None:
        errors = (
            f"predictions for links left out miss by {percent(found['median_error'])} in the median and "
            f"{percent(found['worst_error'])} at worst"
        )
    traffic = found["acceptance"].get(str(LIMITS[1]), {})
    speed = {(row["rtt_ms"], row["max_nodes"]): row["tok_s"] for row in found["projections"]}
    near, far = (speed[rtt, LIMITS[1]] / speed[rtt, 0] for rtt in (5, 150))
    return [
        f"Cross-validation: {errors} (paper A: {paper_a.PROJECTION_ERROR}).",
        f"Speculation commits {traffic.get('mat', 1):.2f} tokens per round trip here and 1.21 to 1.25 there. Over "
        f"sequential that is {near:.2f} times at 5 ms and {far:.2f} times at 150 ms (7B in paper A: 1.14 and 1.04): a "
        "round trip saved is worth more the longer it takes.",
        f"Fixed overhead is {found['fixed_ms']:.0f} ms per round trip at the middle link (42.9 and 46.3 there), of "
        f"which {found['base_ms']:.0f} ms do not depend on it; both sides share one processor here.",
    ]
