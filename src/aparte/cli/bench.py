"""``aparte bench``: measurements that take a while."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.bench_budget import budget
from aparte.cli.bench_load import load
from aparte.cli.bench_memory import memory
from aparte.cli.bench_spade import spade
from aparte.cli.finished import add_row, finished_rows
from aparte.cli.output import note, print_json, progress_bar, show_table
from aparte.cli.setup import connect, load_models
from aparte.config import Compute, Cut, Sampling
from aparte.connection import Connection
from aparte.errors import UserError
from aparte.speculate.settings import Decoding

bench_app = typer.Typer(help="Measure on benchmark data.", no_args_is_help=True, rich_markup_mode=None)


@bench_app.callback()
def _bench() -> None:
    pass


bench_app.command()(budget)
bench_app.command()(spade)
bench_app.command()(load)
bench_app.command()(memory)


@bench_app.command()
def specbench(
    model: options.Model,
    data: Annotated[Path, typer.Option(help="Spec-Bench questions, JSON lines.", show_default=False)],
    limit: Annotated[int | None, typer.Option(min=1, help="So many questions, balanced over tasks.")] = None,
    max_new_tokens: options.MaxNewTokens = 160,
    decode: options.Decode = Decoding.decode,
    draft: options.Draft = Decoding.draft,
    ngram: options.Ngram = Decoding.ngram,
    max_nodes: options.MaxNodes = Decoding.max_nodes,
    in_flight: options.InFlight = Decoding.in_flight,
    rtt: options.Rtt = None,
    mbps: options.Mbps = None,
    seed: options.Seed = 0,
    temperature: options.Temperature = 0.0,
    warm: Annotated[
        bool, typer.Option("--warm", help="Keep the drafter's state from question to question.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Answer each question sequentially too.")
    ] = True,
    resume: Annotated[
        Path | None, typer.Option(help="File of finished rows: read if there, written as it goes on.")
    ] = None,
    cut: options.CutOption = str(Cut()),
    wire: options.Wire = "auto",
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """MAT, nodes, speed and identity on Spec-Bench, by task and as the macro average over six tasks.

    Cold unless --warm: each question starts with nothing learned. Questions are drawn by --seed.
    """
    from aparte.measure import specbench as bench

    decoding = Decoding(decode, ngram, max_nodes, draft=draft, in_flight=in_flight)
    questions = bench.balanced(bench.load_questions(data), limit, seed)
    settings = {
        "model": model,
        "prompts": bench.fingerprint(questions),
        "decode": decode,
        "draft": draft,
        "ngram": ngram,
        "max_nodes": max_nodes,
        "in_flight": in_flight,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "cold": not warm,
        "link": {"rtt_ms": rtt, "mbps": mbps},
        "seed": seed,
        "cut": cut,
        "wire": wire,
        "dtype": dtype,
    }
    done = finished_rows(resume, settings)
    connection = Connection(
        model,
        Cut.parse(cut),
        compute=Compute(dtype, device),  # type: ignore[arg-type]
        wire=wire,  # type: ignore[arg-type]
        rtt_ms=rtt,
        mbps=mbps,
    )
    rows: list[dict[str, Any]] = []
    with connect(connection, quiet=True) as writer, progress_bar() as progress:
        chosen = bench.Options(
            decoding,
            Sampling(temperature=temperature, seed=seed),
            max_new_tokens,
            warm,
            baseline,
            load_models(decoding, connection, writer, quiet=True),
        )
        for row in bench.run(
            writer,
            questions,
            chosen,
            done=done,
            progress=lambda number, total: progress("questions", number, total),
        ):
            rows.append(row)
            if len(rows) > len(done):
                add_row(resume, row)
    report = bench.summarize(rows)
    if baseline:
        report["identical"] = all(row["identical"] for row in rows)
        report["different"] = [row["id"] for row in rows if not row["identical"]]
    report |= settings
    if json:
        print_json(report)
        return
    columns = [
        key for key in ("mat", "nodes_per_step", "tok_s", "speedup", "wasted_share") if key in report["macro"]
    ]
    show_table(
        f"{model}, {decode}, {'warm' if warm else 'cold'}, {len(rows)} questions, {max_new_tokens} tokens",
        ["task", *columns],
        [
            *(
                [task, *(f"{figures[key]:.2f}" for key in columns)]
                for task, figures in report["categories"].items()
            ),
            ["macro average", *(f"{report['macro'][key]:.2f}" for key in columns)],
        ],
    )
    if baseline:
        note(f"Identical to sequential: {'yes' if report['identical'] else 'no'}")


@bench_app.command()
def step(
    model: options.Model,
    nodes: Annotated[str, typer.Option(metavar="N,N,…", help="Nodes per step.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens before the step.")] = 300,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,TOKENS,…",
            help="Lengths of text at which a step of one node is measured. By default 256, 1024, 4096 and "
            "8192, as far as the model's context goes.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats; medians are shown.")] = 15,
    cut: options.CutOption = str(Cut()),
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    kv: options.Kv = Compute.kv,
    batch_invariant: options.BatchInvariant = Compute.batch_invariant,
    graphs: options.Graphs = Compute.graphs,
    json: options.Json = False,
) -> None:
    """What a step costs by its number of nodes: both sides, and the unsplit model of transformers in float32.

    Then what a step of one node costs by the length of the text. No link and no wire format: the forward
    passes alone, in turns, in this process.
    """
    import torch

    from aparte.measure import step_cost
    from aparte.model.parts import Blueprint
    from aparte.model.registry import resolve

    counts = _numbers("--nodes", nodes, "1,2,4,8")
    lengths = None if contexts is None else _numbers("--contexts", contexts, "256,4096")
    compute = Compute(dtype, device, kv, batch_invariant, graphs)  # type: ignore[arg-type]
    folder, wanted = resolve(model), Cut.parse(cut)
    fast, simple = (Blueprint.open(folder, compute, fused=fused) for fused in (True, False))
    longest = fast.uniform_context
    if context + max(counts) > longest:
        raise UserError(f"The model's context is {longest} tokens. Use a smaller --context.")
    if lengths is None:
        lengths = [length for length in step_cost.CONTEXTS if length <= longest]
    elif max(lengths) > longest:
        raise UserError(f"The model's context is {longest} tokens. Use smaller --contexts.")
    with progress_bar() as progress:
        report = step_cost.measure(
            fast,
            simple,
            wanted,
            nodes=counts,
            context=context,
            contexts=lengths,
            repeats=repeats,
            progress=progress,
        )
    result = report.to_dict() | {
        "model": model,
        "cut": str(wanted),
        "dtype": fast.precision.name,
        "kv": kv,
        "batch_invariant": batch_invariant,
        "graphs": graphs,
        "compiled": fast.compiles,
        "context": context,
        "threads": torch.get_num_threads(),
        "prompts": "random states, no text",
        "link": "none",
        "seed": 0,
    }
    if json:
        print_json(result)
        return
    numbers = fast.precision.name + (", compiled" if fast.compiles else "")
    columns = ("middle_ms", "device_ms", "simple_middle_ms", "simple_device_ms", "transformers_ms")
    show_table(
        f"{model}, cut {wanted}, {numbers}, {context} tokens of context, ms",
        ["nodes", *(name.removesuffix("_ms").replace("_", " ") for name in columns)],
        [[str(row["nodes"]), *(f"{row[name]:.1f}" for name in columns)] for row in result["rows"]],
    )
    if lengths:
        show_table(
            "One node, by tokens of text, ms",
            ["tokens", "middle", "device", f"over {min(lengths)}"],
            [
                [
                    str(row["context"]),
                    *(f"{row[name]:.1f}" for name in ("middle_ms", "device_ms")),
                    f"{row['over_shortest']:.2f}x",
                ]
                for row in result["contexts"]
            ],
        )


def _numbers(option: str, given: str, example: str) -> list[int]:
    try:
        numbers = [int(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} {given} is not a list of numbers from 1 on, like {example}.")
    return list(dict.fromkeys(numbers))
