"""Pictures of an audit, as SVG text that stands in the report itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aparte.errors import UserError
from aparte.privacy.attack import ALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's colours, which people tell apart who see colours differently, and a shape for each.
STYLES = (
    ("#0072b2", "o"),
    ("#d55e00", "s"),
    ("#009e73", "^"),
    ("#e69f00", "v"),
    ("#cc79a7", "D"),
    ("#56b4e9", "P"),
    ("#1f2933", "X"),
    ("#999999", "*"),
)
#: Top-1 at the paper's numbers of local layers (880 samples, MLP): arXiv 2602.16760.
PAPER_MLP = {2: 0.588, 4: 0.443, 6: 0.448, 8: 0.348}


def check_plots() -> None:
    """Raise :class:`UserError` if nothing can be drawn: better now than after an hour."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "The audit's plots need matplotlib, which is not installed. Install it with "
            "`pip install 'aparte[audit]'`."
        ) from None


def depth_plot(rows: Sequence[dict[str, Any]]) -> str:
    """Recovered tokens against the layers before the middle, undefended, one line per attack."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get("trained_on", ALL) != ALL:
            continue
        if row["defence"] == "none" and row["target"] == "prompt" and row["name"] not in _FLAT:
            tokens = f", {row['attacker_tokens']:,} tokens" if row["name"] == "mlp" else ""
            lines.setdefault(row["name"] + tokens, []).append((int(row["cut"].split(",")[0]), row["top1"]))
    flat = {row["name"]: row["top1"] for row in rows if row["name"] in _FLAT}
    lines["paper A's MLP (another model)"] = sorted(PAPER_MLP.items())

    def draw(axes: Axes) -> None:
        for (label, points), (colour, marker) in zip(lines.items(), _cycle(len(lines)), strict=True):
            xs, ys = zip(*sorted(points), strict=True)
            style = "--" if label.startswith("paper") else "-"
            axes.plot(xs, [100 * y for y in ys], style, color=colour, marker=marker, label=label)
        for name, value in flat.items():
            axes.axhline(100 * value, color="#aab4bf", linewidth=0.8, linestyle=":")
            axes.annotate(name, (1, 100 * value), xycoords=("axes fraction", "data"), fontsize=8)
        axes.set_xlabel("layers on the device before the middle")
        axes.set_ylabel("prompt tokens recovered, %")
        axes.set_ylim(0, 103)
        axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))

    return _picture(draw)


def frontier_plot(attacks: Sequence[dict[str, Any]], defences: Sequence[dict[str, Any]]) -> str:
    """Recovery by the best attack against the loss of quality, one point per setting and cut."""
    best: dict[tuple[str, str], float] = {}
    for row in attacks:
        if row["target"] == "prompt" and row["name"] not in _FLAT:
            key = (row["cut"], row["defence"])
            best[key] = max(best.get(key, 0.0), row["top1"])
    settings: dict[str, list[tuple[float, float]]] = {}
    for row in defences:
        setting = "none" if row["name"] == "depth" else row["setting"]
        if (row["cut"], setting) in best:
            loss = max(100 * (row["perplexity_ratio"] - 1), 0.1)
            settings.setdefault(setting, []).append((loss, 100 * best[row["cut"], setting]))

    def draw(axes: Axes) -> None:
        for (label, points), (colour, marker) in zip(settings.items(), _cycle(len(settings)), strict=True):
            axes.plot(*zip(*points, strict=True), linestyle="none", color=colour, marker=marker, label=label)
        axes.axhspan(0, 10, xmax=1, color="#009e7318")
        axes.axvline(2, color="#aab4bf", linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel("perplexity above the undefended device's, % (0.1 and less at the left edge)")
        axes.set_ylabel("prompt tokens recovered by the best attack, %")
        axes.set_ylim(0, 103)

    return _picture(draw)


_FLAT = ("uniform", "frequency", "lm_only")


def _cycle(count: int) -> list[tuple[str, str]]:
    """Colours and markers, which come in other pairs when they come again."""
    size = len(STYLES)
    return [(STYLES[index % size][0], STYLES[(index + index // size) % size][1]) for index in range(count)]


def _picture(draw: Any) -> str:
    """An ``<img>`` source that needs no file and no network."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "aparte", "font.size": 10}):
        figure = Figure(figsize=(8.5, 4.6), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.grid(color="#dde3ea")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
