"""What the commands print: answers and JSON on standard output, everything else on standard error.

Tables and colours appear on a terminal; elsewhere the same content is plain text.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from aparte.answer import Piece
    from aparte.model.parts import Progress as Report

#: For people: status, progress, tables beside JSON.
err = Console(stderr=True, highlight=False, soft_wrap=True)

_ROUND_TRIP_STYLES = ("bold cyan", "bold magenta", "bold green", "bold yellow")


def print_json(data: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def write(text: str) -> None:
    """Text of an answer, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(message: str) -> None:
    """A line for people."""
    err.print(message, markup=False)


@contextlib.contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Report]:
    """A progress report ``(label, done, total)`` shown as bars on a terminal, as lines elsewhere."""
    if quiet:
        yield lambda label, done, total: None
        return
    if not err.is_terminal:
        announced: set[str] = set()

        def line(label: str, done: int, total: int) -> None:  # noqa: ARG001
            if label not in announced:
                announced.add(label)
                note(f"{label} ...")

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def bar(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total or None)
            bars.update(tasks[label], completed=done, total=total or None)

        yield bar


class PrefillBar:
    """Progress over a long prompt: appears with the first report, goes with the first text."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._stack = contextlib.ExitStack()
        self._report: Report | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._report is None:
            self._report = self._stack.enter_context(progress_bar(self._quiet))
        self._report("reading the prompt", done, total)

    def close(self) -> None:
        """Take the bar away, before anything is written."""
        self._stack.close()
        self._report = None


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on standard output: drawn on a terminal, aligned plain text elsewhere."""
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table)
        return
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    write(f"{title}\n")
    for row in (columns, *rows):
        cells = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        write("  ".join(cells).rstrip() + "\n")


class RoundTripMarks:
    """Writes an answer so that one sees which tokens came in which round trip.

    On a terminal each round trip has its own colour; elsewhere a bar closes each one.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True) if sys.stdout.isatty() else None
        self._count = 0

    def show(self, piece: Piece) -> None:
        if self._console is None:
            write(piece.text + "|")
        else:
            style = _ROUND_TRIP_STYLES[self._count % len(_ROUND_TRIP_STYLES)]
            self._console.print(piece.text, style=style, end="", markup=False)
        self._count += 1
