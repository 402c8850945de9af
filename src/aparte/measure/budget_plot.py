"""The picture of a budget grid: MAT and speed against the node budget, by task."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aparte.errors import UserError
from aparte.measure.budget_grid import AUTOMATIC, FIXED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
#: Okabe and Ito's colours, which people tell apart who see colours differently, and a shape for each.
_STYLES = (
    ("#0072b2", "o"),
    ("#e69f00", "s"),
    ("#009e73", "^"),
    ("#d55e00", "v"),
    ("#cc79a7", "D"),
    ("#56b4e9", "P"),
)
_INK, _GRID = "#1f2933", "#dde3ea"
_MACRO = "macro average"
_PANELS = (("mat", "MAT, tokens per round trip"), ("tok_s", "speed, tokens per second"))


def check_plot(file: Path) -> None:
    """Raise :class:`UserError` unless a plot could be written there: better now than after an hour."""
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(f"A plot is written as {' or '.join(SUFFIXES)}, not as {file.name}. Rename --plot.")
    if not file.absolute().parent.is_dir():
        raise UserError(f"There is no folder {file.absolute().parent} for --plot. Make it first.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "Plots need matplotlib, which is not installed. Install it with `pip install 'aparte[plots]'`, "
            "or leave --plot out."
        ) from None


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Draw ``categories`` and ``macro`` of a report; the suffix decides between SVG and PNG."""
    check_plot(file)
    import matplotlib

    link = report["categories_link"]
    title = (
        f"Node budgets by task: {link['rtt_ms']:g} ms round trip, {link['mbps']:g} Mbit/s (link simulated), "
        f"{report['questions']} questions"
    )
    with matplotlib.rc_context({"svg.hashsalt": "aparte", "font.size": 10}):
        figure = _draw(report, title)
        if file.suffix.lower() == ".png":
            figure.savefig(file, dpi=150)
            return
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing, facecolor="none")
    file.write_text(self_contained(buffer.getvalue(), title), encoding="utf-8")


def _draw(report: dict[str, Any], title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(10, 5), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))  # inches
    for axes, (key, label) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        _panel(axes, report, key, label)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, color=_INK)
    return figure


def _panel(axes: Axes, report: dict[str, Any], key: str, label: str) -> None:
    """Fixed budgets at equal distances, each twice the last, and the automatic one apart from them."""
    places = list(range(len(FIXED)))
    apart = len(FIXED) + 0.3
    lines = [
        (task.replace("_", " "), figures, colour, marker, 1.4)
        for (task, figures), (colour, marker) in zip(report["categories"].items(), _STYLES, strict=False)
    ]
    lines.append((_MACRO, report["macro"], _INK, "o", 2.6))
    for name, figures, colour, marker, width in lines:
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5.5}
        values = [figures[budget][key] for budget in FIXED]
        axes.plot(places, values, label=name, linewidth=width, **style)
        axes.plot([apart], [figures[AUTOMATIC][key]], linestyle="none", **style)
    axes.axvline(apart - 0.65, color=_GRID, linewidth=1)
    nodes = report["macro"][AUTOMATIC]["nodes_per_step"]
    axes.set_xticks([*places, apart], [*FIXED, f"automatic\nmean {nodes:.1f}"])
    axes.set_xlim(-0.3, apart + 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("node budget, most speculative nodes per step")
    axes.set_ylabel(label)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def self_contained(svg: str, title: str) -> str:
    """The SVG with a title and a frame, and without the addresses of standards that nobody asks for."""
    svg = re.sub(r"<!DOCTYPE.*?>\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns:xlink="[^"]*"', "", svg).replace("xlink:href", "href")
    match = re.search(r"<svg\b[^>]*>", svg)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if match is None or box is None:  # another matplotlib: a picture all the same
        return svg
    width, height = (float(side) - 2 for side in box.groups())
    head = (
        f'\n <title>{escape(title)}</title>\n <rect x="1" y="1" width="{width:g}" height="{height:g}" '
        'rx="10" fill="#ffffff" stroke="#c5ced8"/>'
    )
    return svg[: match.end()] + head + svg[match.end() :]
