"""What a section of the report is: a module that runs something, and makes tables and figures of what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aparte.measure.plot_file import GRID, INK, svg_of
from aparte.report import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from aparte.measure.reproduce.lab import Lab

#: Rows of cells, the head first.
Table = list[list[str]]


@dataclass(frozen=True)
class Figure:
    """A plot to come; ``draw`` fills one pair of axes."""

    name: str
    title: str
    draw: Callable[[Axes], None]
    width: float = 9.0

    def picture(self) -> Picture:
        """Drawn, in the frame that all plots of the project have."""

        def make() -> Any:
            from matplotlib.figure import Figure as Canvas
            from matplotlib.layout_engine import ConstrainedLayoutEngine

            canvas = Canvas(figsize=(self.width, 4.0), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
            axes = canvas.subplots()
            self.draw(axes)
            axes.set_title(self.title, fontsize=11, color=INK, loc="left")
            axes.grid(axis="y", color=GRID)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.get_legend_handles_labels()[0]:
                canvas.legend(loc="outside right upper", frameon=False, fontsize=9)
            return canvas

        return Picture(f"{self.name}.svg", self.title, svg_of(make, self.title))


class Section(Protocol):
    """The names that a module of a section has. ``found`` is what its :meth:`run` returned, read from JSON."""

    #: Short name, for files and ``--only``.
    KEY: str
    TITLE: str
    #: ``paper-a`` or ``paper-b``.
    PAPER: str
    #: What was done here, in a paragraph.
    WHAT: str

    def run(self, lab: Lab) -> dict[str, Any]:
        """Measure. The result is JSON."""
        ...

    def tables(self, found: dict[str, Any]) -> Sequence[Table]:
        """Paper and here side by side."""
        ...

    def figures(self, found: dict[str, Any]) -> Sequence[Figure | Picture]: ...

    def differences(self, found: dict[str, Any]) -> Sequence[str]:
        """A sentence on each difference, the one for the summary first."""
        ...


def number(value: float | None, digits: int = 1) -> str:
    """For a table; nothing for None."""
    return "" if value is None else f"{value:,.{digits}f}"
