"""The picture of a budget grid: MAT and speed against the node budget, by task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aparte.measure.budget_grid import AUTOMATIC, FIXED
from aparte.measure.plot_file import GRID, INK, STYLES, save_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MACRO = "macro average"
_PANELS = (("mat", "MAT, tokens per round trip"), ("tok_s", "speed, tokens per second"))


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Draw ``categories`` and ``macro`` of a report; the suffix decides between SVG and PNG."""
    link = report["categories_link"]
    title = (
        f"Node budgets by task: {link['rtt_ms']:g} ms round trip, {link['mbps']:g} Mbit/s (link simulated), "
        f"{report['questions']} questions"
    )
    save_plot(lambda: _draw(report, title), title, file)


def _draw(report: dict[str, Any], title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(10, 5), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))  # inches
    for axes, (key, label) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        _panel(axes, report, key, label)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def _panel(axes: Axes, report: dict[str, Any], key: str, label: str) -> None:
    """Fixed budgets at equal distances, each twice the last, and the automatic one apart from them."""
    places = list(range(len(FIXED)))
    apart = len(FIXED) + 0.3
    lines = [
        (task.replace("_", " "), figures, colour, marker, 1.4)
        for (task, figures), (colour, marker) in zip(report["categories"].items(), STYLES, strict=False)
    ]
    lines.append((_MACRO, report["macro"], INK, "o", 2.6))
    for name, figures, colour, marker, width in lines:
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5.5}
        values = [figures[budget][key] for budget in FIXED]
        axes.plot(places, values, label=name, linewidth=width, **style)
        axes.plot([apart], [figures[AUTOMATIC][key]], linestyle="none", **style)
    axes.axvline(apart - 0.65, color=GRID, linewidth=1)
    nodes = report["macro"][AUTOMATIC]["nodes_per_step"]
    axes.set_xticks([*places, apart], [*FIXED, f"automatic\nmean {nodes:.1f}"])
    axes.set_xlim(-0.3, apart + 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("node budget, most speculative nodes per step")
    axes.set_ylabel(label)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
