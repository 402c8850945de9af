"""Pictures of benchmarks as files that stand by themselves."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from aparte.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
#: Okabe and Ito's colours, which people tell apart who see colours differently, and a shape for each.
STYLES = (
    ("#0072b2", "o"),
    ("#e69f00", "s"),
    ("#009e73", "^"),
    ("#d55e00", "v"),
    ("#cc79a7", "D"),
    ("#56b4e9", "P"),
)
INK, GRID = "#1f2933", "#dde3ea"


def check_plot(file: Path) -> None:
    """Raise :class:`UserError` unless a plot could be written there: better now than after an hour."""
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(f"A plot is written as {' or '.join(SUFFIXES)}, not as {file.name}. Rename --plot.")
    if not file.absolute().parent.is_dir():
        raise UserError(f"There is no folder {file.absolute().parent} for --plot. Make it first.")
    check_drawing("or leave --plot out")


def check_drawing(otherwise: str) -> None:
    """Raise :class:`UserError` if nothing can be drawn; ``otherwise`` says what to do instead."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "Plots need matplotlib, which is not installed. Install it with `pip install 'aparte[plots]'`, "
            f"{otherwise}."
        ) from None


def save_plot(draw: Callable[[], Figure], title: str, file: Path) -> None:
    """Draw and write; the suffix decides between SVG and PNG."""
    check_plot(file)
    if file.suffix.lower() != ".png":
        file.write_text(svg_of(draw, title), encoding="utf-8")
        return
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "aparte", "font.size": 10}):
        draw().savefig(file, dpi=150)


def svg_of(draw: Callable[[], Figure], title: str) -> str:
    """The plot as SVG that needs nothing else."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "aparte", "font.size": 10}):
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw().savefig(buffer, format="svg", metadata=nothing, facecolor="none")
    return self_contained(buffer.getvalue(), title)


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
