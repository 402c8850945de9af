"""``aparte reproduce``: both papers' tables and figures, run again on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar
from aparte.config import DEFAULT_MODEL, Compute, Cut
from aparte.errors import UserError


def reproduce(
    paper: Annotated[
        str, typer.Argument(metavar="[paper-a|paper-b|all]", help="Which paper.", show_default=False)
    ] = "all",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html, report.md, plots, results.json.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything: minutes instead of hours.")
    ] = False,
    model: Annotated[str, typer.Option(help="As MODEL for generate.")] = DEFAULT_MODEL,
    data: Annotated[
        Path | None,
        typer.Option(help="Spec-Bench questions, JSON lines; own ones without it.", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Sections, joined by commas; all without it.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of draws, training and resampling.")] = 0,
    cut: options.CutOption = str(Cut()),
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """Run the papers' experiments again and write one report: the paper's figures beside those found here.

    An interrupted run goes on when started again with the same options and folder.
    """
    from aparte.measure.reproduce.settings import Settings, check_paper

    check_paper(paper)
    if out is None:
        raise UserError("Give --out, the folder for the report.")
    from aparte.measure.plot_file import check_drawing
    from aparte.measure.reproduce.page import summary, write_report
    from aparte.measure.reproduce.run import choose, run_sections
    from aparte.measure.scores import check_scores

    names = [part.strip() for part in (only or "").split(",") if part.strip()]
    sections = choose(paper, names)
    check_drawing("or with everything a report needs: `pip install 'aparte[audit]'`")
    check_scores()
    if data is not None:
        from aparte.measure.specbench import load_questions

        load_questions(data)  # a wrong file is told now, not after half an hour
    settings = Settings(
        model,
        quick,
        seed,
        data,
        Cut.parse(cut),
        Compute(dtype, device),  # type: ignore[arg-type]
    )
    with progress_bar() as progress:
        results = run_sections(settings, sections, out, progress)
    write_report(results, out)
    for sentence in summary(results):
        note(sentence)
    note(f"The report is in {out / 'report.html'}.")
    if json:
        print_json(results)
