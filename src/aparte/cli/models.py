"""``aparte models``: what is available, where it is cached, how large; and getting one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from aparte.config import Cut, one_of

if TYPE_CHECKING:
    from aparte.model.folders import Progress
    from aparte.model.registry import ModelEntry

models_app = typer.Typer(help="List the models that can be used, or get one.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

#: What can be fetched of a model.
PARTS = ("whole", "front-back", "middle")
#: Without a terminal, progress is a line on standard error, at most this often.
_LINE_INTERVAL_S = 5.0


@models_app.callback(invoke_without_command=True)
def list_models(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the models on this machine and the embedded default."""
    if context.invoked_subcommand is not None:
        return
    from aparte.config import cache_dir
    from aparte.model.registry import available

    entries = available()
    if as_json:
        value = {"models": [entry.to_json() for entry in entries], "cache": str(cache_dir())}
        typer.echo(json.dumps(value, indent=2))
    elif sys.stdout.isatty():
        _print_table(entries)
    else:
        for entry in entries:
            size = _size(entry.size_bytes) if entry.cached else "not downloaded"
            typer.echo("\t".join((entry.name, entry.source, size, str(entry.path or ""))))


@models_app.command("get")
def get_model(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Name, folder, GGUF file or hub id.")],
    part: Annotated[
        str, typer.Option(help="whole; front-back: what the device needs; middle: what the cloud needs.")
    ] = PARTS[0],
    cut: Annotated[
        str, typer.Option("--cut", metavar="K,M", help="First K and last M layers are the device's.")
    ] = str(Cut()),
    as_json: JsonOption = False,
) -> None:
    """Download or convert a model now, so that later commands find it.

    Of a checkpoint in several files on a hub, --part fetches only those that hold tensors of that part.
    """
    from aparte.model import folders
    from aparte.model.checkpoint import Checkpoint
    from aparte.model.needed import needed_by_cloud, needed_by_device
    from aparte.model.registry import hub_name, resolve

    one_of(part, PARTS, "part")
    where = Cut.parse(cut)
    wanted = {PARTS[1]: needed_by_device(where), PARTS[2]: needed_by_cloud(where)}.get(part)
    with progress_on_stderr() as progress:
        path = resolve(name, wanted=wanted, tokenizer=part != PARTS[2], progress=progress)
        checkpoint = Checkpoint.open(path)
        if wanted is not None:
            where.middle(checkpoint.config_dict["num_hidden_layers"])  # a cut that does not fit is said now
    size = folders.size_of(path)
    if as_json:
        result = {"name": name, "path": str(path), "size_bytes": size, "part": part, "cut": str(where)}
        typer.echo(json.dumps(result))
        return
    typer.echo(f"{name}: {path} ({_size(size)})")
    if wanted is not None and hub_name(name) is None:
        typer.echo("It is on this machine whole. Parts are fetched by themselves only from a hub.", err=True)


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Show progress while the block runs: a bar on a terminal, now and then a line elsewhere."""
    if sys.stderr.isatty():
        with _bars() as progress:
            yield progress
    else:
        yield _Lines()


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(label: str, done: int, total: int) -> None:
            if label not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, visible=False)
                tasks[label] = bars.add_task(escape(label), total=None, amount="")
            amount = f"{_size(done)} of {_size(total)}" if total else ""
            bars.update(tasks[label], completed=done, total=total or None, amount=amount)

        yield progress


class _Lines:
    """Progress as plain lines: each new label once, then its share every few seconds."""

    def __init__(self) -> None:
        self.label = ""
        self.next_s = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if label == self.label and now_s < self.next_s:
            return
        share = f" {100 * done // total} %" if total and label == self.label else ""
        self.label, self.next_s = label, now_s + _LINE_INTERVAL_S
        typer.echo(f"{label} ...{share}", err=True)


def _print_table(entries: list[ModelEntry]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("MODEL", "from", "size", "folder")
    for entry in entries:
        size = _size(entry.size_bytes) if entry.cached else "not downloaded"
        table.add_row(escape(entry.name), entry.source, size, escape(str(entry.path or "")))
    Console().print(table)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
