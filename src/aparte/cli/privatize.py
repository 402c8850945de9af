"""``aparte privatize``: train a secret front and back around the public middle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar
from aparte.config import Cut
from aparte.errors import UserError


def privatize(
    model: options.Model,
    cut: options.CutOption = str(Cut()),
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the private ends go. By default in the cache folder.",
            show_default=False,
        ),
    ] = None,
    strength: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="L",
            help="How hard training leads those astray who have the public weights, against quality.",
        ),
    ] = 0.02,
    mask: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="NATS",
            help="What decoys in every state may cost, in divergence per token, before training.",
        ),
    ] = 0.002,
    rank: Annotated[
        str, typer.Option(metavar="R", help="Rank of the changes of front and back, or full.")
    ] = "16",
    steps: Annotated[int, typer.Option(min=0, help="Training steps, of two conversations each.")] = 400,
    tokens: Annotated[
        int, typer.Option(min=1000, help="Tokens of conversation to write and learn from.")
    ] = 36_000,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for conversations and checkpoints. By default in the cache folder; emptied at the "
            "end.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the conversations and the last checkpoint.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the conversations. The secret never comes from a seed.")] = 0,
    device: options.DeviceOption = "auto",
    json: options.Json = False,
) -> None:
    """Train a secret front and back for MODEL that work with its public middle. Nothing leaves this machine.

    Use them with --private-ends; the cloud serves what it served before. What they hide, and what they cost,
    says `aparte audit --defences none,private-ends=FILE`. An interrupted run goes on where it was when
    started again with the same options.
    """
    from aparte.privatize.train import Recipe, Report
    from aparte.privatize.workshop import Workshop

    reports: list[dict[str, Any]] = []

    def report(line: Report) -> None:
        reports.append(line.to_json())
        note(line.describe())

    recipe = Recipe(strength=strength, mask=mask, rank=_rank(rank), steps=steps, seed=seed)
    with progress_bar() as progress:
        workshop = Workshop.open(
            model, Cut.parse(cut), device, work=work, out=out, recipe=recipe, progress=progress
        )
        result = workshop.run(tokens, progress, report, keep=keep)
    note(f"The private ends are in {result} ({result.stat().st_size / 1e6:.1f} MB). Keep them to yourself.")
    if json:
        print_json({"model": model, "cut": cut, "private_ends": str(result), "reports": reports})


def _rank(text: str) -> int:
    """0 stands for a full change."""
    if text == "full":
        return 0
    try:
        rank = int(text)
    except ValueError:
        rank = 0
    if not 1 <= rank <= 4096:
        raise UserError(f"The rank is {text!r}; it must be full, or between 1 and 4096.")
    return rank
