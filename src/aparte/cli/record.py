"""``aparte record``: look at what ``--record`` kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, show_table

record_app = typer.Typer(
    help="Look at a recording of what the cloud saw.", no_args_is_help=True, rich_markup_mode=None
)


@record_app.callback()
def _group() -> None:
    pass


@record_app.command("show")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recording.", show_default=False)],
    steps: Annotated[int, typer.Option(min=0, metavar="N", help="Steps to show of each session.")] = 20,
    json: options.Json = False,
) -> None:
    """Sizes, times, shapes and lengths of states in FILE, by session and step. Shows no content."""
    from aparte.measure.recorded import summary
    from aparte.wire.record import read_recording

    found = summary(read_recording(file))
    if json:
        print_json(found)
        return
    about = found["about"]
    title = f"{about['model']}, {about['target']}, cut {about['cut']}, {about['wire']} x {about['width']}"
    columns = ("step", "at_s", "nodes", "commit", "bytes_up", "bytes_down", "wait_ms", "cloud_ms", "norm_up")
    for number, session in enumerate(found["sessions"], start=1):
        show_table(
            f"{title}, session {number}: {len(session['steps'])} steps, {session['nodes']} nodes, "
            f"{session['bytes_up'] / 1e3:.0f} kB up, {session['bytes_down'] / 1e3:.0f} kB down, "
            f"{session['connections']} connections" + _errors(session),
            list(columns),
            [[_cell(step[name]) for name in columns] for step in session["steps"][:steps]],
        )
        if len(session["steps"]) > steps:
            note(f"... and {len(session['steps']) - steps} more steps (--steps N).")
    if not found["sessions"]:
        note("No session is in it.")
    if found["cut_short"]:
        note("Its end is missing; everything up to there was read.")


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _errors(session: dict[str, Any]) -> str:
    return f", errors: {', '.join(session['errors'])}" if session["errors"] else ""
