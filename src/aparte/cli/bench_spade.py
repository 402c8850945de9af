"""``aparte bench spade``: edge drafts and cloud verdicts, against cloud only and edge only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.finished import add_row, finished_rows
from aparte.cli.output import note, print_json, progress_bar, show_table
from aparte.config import Compute, Cut, Sampling, one_of
from aparte.errors import UserError
from aparte.speculate.settings import GOALS, Drafting

if TYPE_CHECKING:
    from aparte.measure.spade_setup import Sides
    from aparte.model.parts import Progress

SHAPES = ("chain", "tree")
NO_LENGTHS = "none"


def spade(
    model: options.Model,
    data: Annotated[Path, typer.Option(help="Spec-Bench questions, JSON lines.", show_default=False)],
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT",
            help="bridge, context, recycling, common, shallow:K or a model, joined by +. By default all that "
            "is there.",
            show_default=False,
        ),
    ] = Drafting.draft,
    d: Annotated[
        str, typer.Option("--d", metavar="LIST", help="Tokens per block; auto: as --draft-for says.")
    ] = "1,2,4,6,8,12,16,24,auto",
    draft_for: options.DraftFor = GOALS[1],
    shape: Annotated[
        str | None,
        typer.Option(
            help="tree of d nodes, or chain of d tokens, the default for coupled acceptance.",
            show_default=False,
        ),
    ] = None,
    colocated: Annotated[
        str,
        typer.Option(metavar="LIST", help="Of these, with the drafter beside the verifier too; or none."),
    ] = "4",
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8,
            help="Blocks under way at a time, by round trip; 1 leaves it out. By default as many as pay.",
            show_default=False,
        ),
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Keep what drafting learns from question to question.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="So many questions, balanced over tasks.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Only questions of this task, like summarization.", show_default=False)
    ] = None,
    max_new_tokens: options.MaxNewTokens = 160,
    accept: options.Accept = Drafting.accept,
    temperature: options.Temperature = Sampling.temperature,
    seed: options.Seed = Sampling.seed,
    mbps: Annotated[float, typer.Option(min=0.001, help="Bandwidth that bytes are charged at.")] = 100.0,
    scores: Annotated[
        bool, typer.Option("--scores/--no-scores", help="BLEU and ROUGE of summaries (extra: scores).")
    ] = True,
    resume: Annotated[
        Path | None, typer.Option(help="File of finished rows: read if there, written as it goes on.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the sweep over d, .svg or .png (extra: plots).")
    ] = None,
    cut: options.CutOption = str(Cut()),
    dtype: options.Dtype = Compute.dtype,
    batch_invariant: options.BatchInvariant = Compute.batch_invariant,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """SPADE: cloud calls, cloud time, speed and scores of drafting here and verifying in the cloud, by d.

    Cloud only, edge only, every d, the drafter beside the verifier, and drafting while the cloud verifies
    take turns on each question. Both sides compute in this process; the link's time is added by arithmetic.
    The prompt is read beforehand and reported apart.
    """
    from aparte.measure import scores as scoring
    from aparte.measure import spade as bench
    from aparte.measure import spade_plot, spade_report, specbench
    from aparte.measure.plot_file import check_plot
    from aparte.measure.simulated_link import LABEL

    lengths, auto = bench.parse_sweep(d)
    if not auto and draft_for != GOALS[1]:
        raise UserError(
            f"--draft-for says what auto is for, and --d {d} has none. Add auto to --d, or leave it out."
        )
    beside = () if colocated == NO_LENGTHS else bench.parse_lengths(colocated, "--colocated")
    where = Cut.parse(cut)
    if draft is None:
        from aparte.drafting import default_names

        draft = "+".join(default_names(model, where))
    drafting = Drafting(draft, accept=accept, goal=draft_for)
    sampling = Sampling(temperature, seed=seed)
    coupled = not sampling.greedy and accept != "rejection"
    shape = shape or ("chain" if coupled else "tree")
    one_of(shape, SHAPES, "shape")
    if shape == "tree" and coupled:
        raise UserError(
            "Coupled acceptance goes with chains: the draft picks the token that the verifier would. Use "
            "--shape chain, --accept rejection, or no --temperature."
        )
    if plot is not None:
        check_plot(plot)
    if scores:
        scoring.check_scores()
    found = specbench.load_questions(data)
    if task is not None:
        one_of(task, specbench.TASKS, "task")
        found = [question for question in found if question.task == task]
    questions = specbench.balanced(found, limit, seed)
    references = bench.load_references(data) if scores else {}
    settings: dict[str, Any] = {
        "model": model,
        "prompts": specbench.fingerprint(questions),
        "draft": draft,
        "lengths": list(lengths),
        "auto": auto,
        "draft_for": draft_for,
        "warm": warm,
        "beside": list(beside),
        "in_flight": in_flight,
        "shape": shape,
        "accept": "greedy" if sampling.greedy else accept,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "mbps": mbps,
        "scores": scores,
        "cut": cut,
        "dtype": dtype,
        "batch_invariant": batch_invariant,
    }
    done = finished_rows(resume, settings)
    compute = Compute(dtype, device, batch_invariant=batch_invariant)  # type: ignore[arg-type]
    chosen = bench.Options(
        sampling,
        max_new_tokens,
        lengths,
        rejection=accept == "rejection",
        tree=shape == "tree",
        auto=auto,
        goal=draft_for,
        warm=warm,
        colocated=beside,
        in_flight=in_flight,
    )
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        sides = _open(model, where, compute, drafting, mbps, progress)
        try:
            measured = bench.Bench(sides.edge, sides.bare, chosen, references, sides.plain)
            for row in measured.run(
                questions, done=done, progress=lambda number, total: progress("questions", number, total)
            ):
                rows.append(row)
                if len(rows) > len(done):
                    add_row(resume, row)
        finally:
            sides.close()
    exact = sampling.greedy or accept == "coupled"
    report = spade_report.summarize(rows, lengths, mbps, references, exact=exact)
    report |= {
        "edge_memory_share": round(sides.memory_share, 4),
        "bare_length": chosen.bare_length,
        "link_simulated": LABEL,
        **settings,
    }
    if plot is not None:
        spade_plot.write_plot(report, plot)
    if json:
        print_json(report)
        return
    _show(report)


def _open(
    model: str, cut: Cut, compute: Compute, drafting: Drafting, mbps: float, progress: Progress
) -> Sides:
    from aparte.bridge.file import require_bridge
    from aparte.measure.spade_setup import open_sides
    from aparte.measure.wan_link import WanProfile
    from aparte.model.parts import Blueprint
    from aparte.model.registry import resolve

    other = None
    blueprint = Blueprint.open(resolve(model, progress=progress), compute)
    if drafting.model is not None:
        other = Blueprint.open(resolve(drafting.model, progress=progress), compute)
    return open_sides(
        blueprint,
        model,
        drafting,
        bridge=require_bridge(model, cut) if "bridge" in drafting.names else None,
        cut=cut,
        draft_model=other,
        profile=WanProfile(rtt_ms=80, mbps=mbps),
        progress=progress,
    )


def _show(report: dict[str, Any]) -> None:
    from aparte.measure import spade_report
    from aparte.measure.spade_baselines import pipelined_cells

    title = (
        f"{report['model']}, draft {report['draft']}, {report['accept']}, {report['max_new_tokens']} tokens"
    )
    show_table(f"{title}, {report['questions']} questions", *spade_report.cells(report))
    if "summarization" in report:
        show_table(f"{title}, summaries", *spade_report.cells(report, "summarization"))
    if "pipelined" in report:
        ahead = f"{title}, d={report['bare_length']}, drafting on while a block is verified"
        show_table(ahead, *pipelined_cells(report["pipelined"]))
    paper = report["paper"]["models"]
    note(f"Paper: {paper}, no network; its calls and cloud time are of a prototype without caches.")
    note("Times and bytes are of the answers, without reading the prompt.")
    if "colocated" in report:
        note("Co-located: the drafter runs beside the verifier, as the cloud's time; only the text is sent.")
    note(f"Link {report['link_simulated']}.")
    note(f"Weights on the edge: {100 * report['edge_memory_share']:.1f} % of the whole model.")
    best = report["spade"]
    note(
        f"d={best['d']}: below a round trip of {best['break_even_rtt_ms']:.0f} ms it is faster than the "
        "cloud by itself, for one user; it saves cloud time at any."
        if best["break_even_rtt_ms"] > 0 and best["cloud_time_ratio"] < 1
        else f"d={best['d']}: the cloud by itself is faster at any round trip, for one user."
    )
    note(f"Least cloud time of all d: {report['cheapest_d']}.")
    if "cloud_only_plain" in report:
        least = next(row for row in report["sweep"] if row["d"] == report["cheapest_d"])
        ratio = least["cloud_time_ratio"] / report["cloud_only_plain"]["cloud_time_ratio"]
        note(
            f"Of the time of the cloud by itself without --batch-invariant, d={report['cheapest_d']} takes "
            f"{ratio:.2f}."
        )
    if "automatic" in report:
        found = report["automatic"]
        note(
            f"Automatic, for {report['draft_for']}: {found['drafted_per_call']:.1f} nodes per call, "
            f"{found['cloud_time_ratio']:.2f} of the cloud's time."
        )
    if best["identical"] is not None:
        everywhere = not report["different"]
        note(f"Identical to the cloud by itself: {'yes' if everywhere else 'no'}")
