"""``aparte bridge``: train the module that lets the device draft by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar
from aparte.config import Cut

bridge_app = typer.Typer(
    help="Train a bridge: a small draft model in place of the middle.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bridge_app.callback()
def _bridge() -> None:
    pass


@bridge_app.command()
def train(
    model: options.Model,
    cut: options.CutOption = str(Cut()),
    tokens: Annotated[
        int, typer.Option(min=1000, help="Tokens of conversation to write and learn from.")
    ] = 490_000,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps, of four conversations each, or two with --text.")
    ] = 1300,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Plain text, a paragraph to a line: half of the questions are about passages of it. May be "
            "given several times.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="BRIDGE",
            help="Go on from this bridge, a file; or shipped.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the bridge goes. By default where auto finds it.", show_default=False),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for conversations and checkpoints, some GB. By default in the cache folder; "
            "emptied at the end.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the conversations and the last checkpoint.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the conversations and of the training.")] = 0,
    device: options.DeviceOption = "auto",
    json: options.Json = False,
) -> None:
    """Let MODEL write conversations with itself, and train a bridge on its states.

    Needs the whole model on this machine and nothing else: no data, unless you give some, and no cloud. An
    interrupted run goes on where it was when started again with the same options.
    """
    from aparte.bridge.file import shipped_bridge
    from aparte.bridge.train import Recipe, Report
    from aparte.bridge.workshop import Workshop

    reports: list[dict[str, Any]] = []

    def report(line: Report) -> None:
        reports.append(line.to_json())
        note(line.describe())

    begin = None if start is None else shipped_bridge(model) if start == "shipped" else Path(start)
    recipe = Recipe.of(steps, seed, with_texts=bool(text), further=begin is not None)
    with progress_bar() as progress:
        workshop = Workshop.open(
            model,
            Cut.parse(cut),
            device,
            work=work,
            out=out,
            recipe=recipe,
            texts=text or (),
            start=begin,
            progress=progress,
        )
        result = workshop.run(tokens, progress, report, keep=keep)
    note(f"The bridge is in {result} ({result.stat().st_size / 1e6:.1f} MB).")
    if json:
        print_json({"model": model, "cut": cut, "bridge": str(result), "reports": reports})
