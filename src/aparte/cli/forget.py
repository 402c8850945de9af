"""``aparte forget``: erase what ``--remember`` kept."""

from __future__ import annotations

import typer

from aparte.cli import options
from aparte.cli.output import print_json


def forget(json: options.Json = False) -> None:
    """Erase what earlier conversations taught the drafters (see --remember)."""
    from aparte.speculate.memory import erase, memory_dir

    count = erase()
    if json:
        print_json({"erased": count, "folder": str(memory_dir())})
    else:
        typer.echo(f"Erased {count} {'table' if count == 1 else 'tables'} in {memory_dir()}.")
