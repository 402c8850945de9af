"""The picture of a sweep over the block length: what the cloud saves, and how fast the text comes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aparte.measure.plot_file import GRID, INK, STYLES, save_plot
from aparte.measure.spade import CLOUD, EDGE, PLAIN, RTTS_MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Draw ``sweep`` of a report; the suffix decides between SVG and PNG."""
    title = title_of(report)
    save_plot(lambda: draw(report, title), title, file)


def title_of(report: dict[str, Any]) -> str:
    """What was measured, in a line."""
    return (
        f"{Path(report['model']).name} verifies what {report['draft']} drafts, {report['accept']}, "
        f"{report['questions']} questions (link simulated)"
    )


def draw(report: dict[str, Any], title: str) -> Figure:
    """Costs on the left, speeds on the right."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(10, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))  # inches
    left, right = figure.subplots(1, 2)
    _costs(left, report)
    _speeds(right, report)
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def _costs(axes: Axes, report: dict[str, Any]) -> None:
    """Shares of cloud only: calls and compute time, and with the draft model on the cloud where measured."""
    sweep = report["sweep"]
    lengths = [row["d"] for row in sweep]
    places = list(range(len(sweep)))
    beside = [row for row in report.get("colocated", ()) if row["d"] in lengths]
    lines = [
        ("cloud calls", places, [1 - row["call_reduction"] for row in sweep]),
        ("cloud time", places, [row["cloud_time_ratio"] for row in sweep]),
    ]
    if beside:
        shown = [lengths.index(row["d"]) for row in beside]
        lines.append(("cloud time, co-located", shown, [row["cloud_time_ratio"] for row in beside]))
    for (name, at, values), (colour, marker) in zip(lines, STYLES, strict=False):
        axes.plot(at, values, label=name, color=colour, marker=marker, markersize=5.5, linewidth=1.8)
    alone = {"cloud only": (1.0, "--")}
    if PLAIN in report:
        alone["cloud only, without --batch-invariant"] = report[PLAIN]["cloud_time_ratio"], ":"
    for name, (height, dashes) in alone.items():
        axes.axhline(height, color=INK, linewidth=1, linestyle=dashes)
        axes.annotate(name, (0, height), xytext=(0, 4), textcoords="offset points", fontsize=9)
    axes.set_ylabel("share of cloud only, per token")
    _finish(axes, sweep)
    axes.legend(frameon=False, fontsize=9)


def _speeds(axes: Axes, report: dict[str, Any]) -> None:
    """By round trip; dashed what the cloud does alone, dotted what the edge does."""
    sweep = report["sweep"]
    places = range(len(sweep))
    for rtt, (colour, marker) in zip(RTTS_MS, STYLES, strict=False):
        values = [row["tok_s"][str(rtt)] for row in sweep]
        axes.plot(
            places, values, label=f"{rtt} ms", color=colour, marker=marker, markersize=5.5, linewidth=1.8
        )
    # One round trip per answer: the same to the eye on every link, so one line, at the longest.
    alone = {"cloud only": (report[CLOUD]["tok_s"][str(RTTS_MS[-1])], "--")}
    if EDGE in report:
        alone["edge only"] = report[EDGE]["tok_s"][str(RTTS_MS[-1])], ":"
    for name, (value, dashes) in alone.items():
        axes.axhline(value, color=INK, linewidth=1, linestyle=dashes, label=name)
    axes.set_ylabel("tokens per second, by round trip")
    _finish(axes, sweep)
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # the legend lies on no line
    axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)


def _finish(axes: Axes, sweep: list[dict[str, Any]]) -> None:
    axes.set_xticks(range(len(sweep)), [str(row["d"]) for row in sweep])
    axes.set_xlabel("d, drafted tokens per block")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
