"""``aparte bench budget``: the automatic node budget against fixed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.finished import add_row, finished_rows
from aparte.cli.output import note, print_json, progress_bar, show_table
from aparte.cli.setup import load_models
from aparte.config import Compute, Cut, Sampling
from aparte.connection import Connection
from aparte.speculate.settings import Decoding


def budget(
    model: options.Model,
    data: Annotated[Path, typer.Option(help="Spec-Bench questions, JSON lines.", show_default=False)],
    limit: Annotated[int | None, typer.Option(min=1, help="So many questions, balanced over tasks.")] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    links: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Links to simulate, RTT in ms x Mbit/s, like 80x100,150x20. By default 5, 20, 80 and 150 ms "
            "by 20, 100 and 1000 Mbit/s.",
            show_default=False,
        ),
    ] = None,
    seed: options.Seed = 0,
    resume: Annotated[
        Path | None, typer.Option(help="File of finished rows: read if there, written as it goes on.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw MAT and speed by node budget, .svg or .png (extra: plots).")
    ] = None,
    cut: options.CutOption = str(Cut()),
    wire: options.Wire = "auto",
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """What the automatic node budget loses against the best fixed one of 0, 4, 8, 16, 32 and 64, by link.

    Greedy, cold, first turns, no pipelining. Both sides really compute, in this process; the link's time is
    added by arithmetic. Speeds leave out the first step, which carries the prompt.
    """
    from aparte.measure import budget_grid, budget_plot, budget_report, plot_file, specbench
    from aparte.measure.simulated_link import LABEL, open_simulated
    from aparte.model.parts import Blueprint
    from aparte.model.registry import resolve

    profiles = budget_grid.parse_links(links)
    connection = Connection(
        model,
        Cut.parse(cut),
        compute=Compute(dtype, device),  # type: ignore[arg-type]
        wire=wire,  # type: ignore[arg-type]
    )
    if plot is not None:
        plot_file.check_plot(plot)
    questions = specbench.balanced(specbench.load_questions(data), limit, seed)
    settings: dict[str, Any] = {
        "model": model,
        "prompts": specbench.fingerprint(questions),
        "decode": Decoding.decode,
        "max_new_tokens": max_new_tokens,
        "links": [[profile.rtt_ms, profile.mbps] for profile in profiles],
        "seed": seed,
        "cut": cut,
        "wire": wire,
        "dtype": dtype,
    }
    done = finished_rows(resume, settings)
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        blueprint = Blueprint.open(resolve(model, progress=progress), connection.compute)
        writer, link = open_simulated(
            blueprint, model, connection.cut, wire=connection.wire, progress=progress
        )
        try:
            chosen = budget_grid.Options(
                Sampling(seed=seed), max_new_tokens, load_models(Decoding(), connection, writer, quiet=True)
            )
            for row in budget_grid.run(
                writer,
                link,
                questions,
                profiles,
                chosen,
                done=done,
                progress=lambda number, total: progress("questions on links", number, total),
            ):
                rows.append(row)
                if len(rows) > len(done):
                    add_row(resume, row)
        finally:
            writer.target.close()
    report = budget_report.summarize(rows, profiles)
    report |= {
        "link_simulated": LABEL,
        "replayed": list(chosen.replayed),
        "models": sorted(chosen.models),
        **settings,
    }
    if plot is not None:
        budget_plot.write_plot(report, plot)
    if json:
        print_json(report)
        return
    show_table(
        f"{model}, auto, {report['questions']} questions, {max_new_tokens} tokens, tok/s by node budget",
        *budget_report.cells(report),
    )
    note(f"Link {LABEL}.")
    note(
        f"Measured once per question, not once per link: budget {', '.join(chosen.replayed)}; the others but "
        "the automatic one once per question and round trip."
    )
    note(f"Same text under all budgets: {'yes' if report['identical'] else 'no'}")
