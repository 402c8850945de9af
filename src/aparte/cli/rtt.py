"""``aparte rtt``: fit what steps cost to measured runs, check the fit, and project speeds."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar, show_table
from aparte.config import DEFAULT_MODEL, Compute, Cut
from aparte.errors import UserError


def rtt(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As for generate.", show_default=False),
    ] = DEFAULT_MODEL,
    cloud: Annotated[
        str | None, typer.Option(help="Measure the way to this cloud, ws://host:port or wss://host:port.")
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="MS,…xMBPS,…",
            help="Emulate every round trip with every bandwidth. Without --cloud by default "
            "5,20,40,80,150x20,100,1000.",
            show_default=False,
        ),
    ] = None,
    max_nodes: Annotated[
        str, typer.Option(metavar="N,N,…", help="Limits on speculative nodes to measure; 0 is sequential.")
    ] = "0,4,16",
    decode: Annotated[
        str, typer.Option(help="Drafting sources joined by +; none that draft by what a link makes pay.")
    ] = "context+recycling+runner-up",
    prompts: Annotated[int, typer.Option(min=1, max=12, metavar="N", help="So many built-in prompts.")] = 2,
    max_new_tokens: options.MaxNewTokens = 32,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="So often on every link.")] = 2,
    project: Annotated[
        str, typer.Option(metavar="MS,…xMBPS,…", help="Links to project speeds for.")
    ] = "5,20,80,150x20,100",
    cuts: Annotated[
        str | None,
        typer.Option(metavar="K,M;K,M;…", help="Cuts to project speeds for; --cut without it."),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Limits on nodes to project speeds for; --max-nodes without it."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling for intervals.")] = 0,
    cut: options.CutOption = str(Cut()),
    wire: options.Wire = "auto",
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    pin: options.Pin = None,
    json: options.Json = False,
) -> None:
    """Measure what steps cost over a link or many, cross-validate the model, and project other links.

    time = rounds x (round trip + fixed) + bytes / bandwidth + nodes x cost. Speeds leave out the prompt.
    """
    if cloud is not None and emulate is not None:
        raise UserError("--cloud measures a link that is there, --emulate makes some. Give one of them.")
    from aparte.config import WireName, one_of
    from aparte.measure import prompts as built_in
    from aparte.measure import rtt_runs
    from aparte.measure.prompts import digest
    from aparte.measure.rtt_report import GRID, RttReport, parse_cuts, parse_grid
    from aparte.model.needed import needed_by_device
    from aparte.model.parts import Blueprint
    from aparte.model.registry import resolve
    from aparte.speculate.common import shipped_table

    one_of(wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    profiles = None if cloud is not None else parse_grid(emulate or GRID, "--emulate")
    targets = parse_grid(project, "--project")
    limits, wanted = _limits(max_nodes, "--max-nodes"), Cut.parse(cut)
    asked = limits if budgets is None else _limits(budgets, "--budgets")
    compute = Compute(dtype, device)  # type: ignore[arg-type]
    reach = rtt_runs.Reach(
        wire,  # type: ignore[arg-type]
        options.read_token(token_file),
        tls_ca,
        pins=tuple(pin or ()),
    )
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(progress_bar())
        needed = None if cloud is None else needed_by_device(wanted)
        blueprint = Blueprint.open(resolve(model, wanted=needed, progress=progress), compute)
        cut_list = (wanted,) if cuts is None else parse_cuts(cuts, blueprint.layers)
        here = rtt_runs.Device(blueprint, model, wanted, reach, progress)
        table = shipped_table(model)
        plan = rtt_runs.Plan(
            [
                tuple(here.codec.encode_chat([{"role": "user", "content": text}]))
                for text in built_in.PROMPTS[:prompts]
            ],
            limits,
            decode,
            max_new_tokens,
            repeats,
            {} if table is None else {"common": table},
        )
        if profiles is None:
            assert cloud is not None
            places = [here.place(cloud)]
            stack.callback(places[0].writer.target.close)
        else:
            places = stack.enter_context(rtt_runs.emulated(here, model, wanted, compute, profiles, progress))
        measured = rtt_runs.measure(places, plan, lambda done, total: progress("answers", done, total))
        report = RttReport(
            places,
            measured,
            cut=wanted,
            layers=blueprint.layers,
            device_layer_ms=here.layer_ms(),
            seed=seed,
        )
        result: dict[str, Any] = report.to_json() | {
            "projections": report.projections(targets, cut_list, asked),
            "model": model,
            "cut": cut,
            "decode": decode,
            "dtype": blueprint.precision.name,
            "wire": wire,
            "cloud": cloud,
            "prompts": prompts,
            "prompt_hash": digest(built_in.PROMPTS[:prompts]),
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "seed": seed,
        }
    if json:
        print_json(result)
    else:
        _show(result)


def _limits(text: str, option: str) -> tuple[int, ...]:
    try:
        limits = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        limits = ()
    if not limits or not all(0 <= limit <= 256 for limit in limits):
        raise UserError(f"{option} {text} is not a list of numbers from 0 to 256, like 0,4,16.")
    return limits


def _show(result: dict[str, Any]) -> None:
    def rate(value: float | None) -> str:
        return "unlimited" if value is None else f"{value:g}"

    show_table(
        "Links as measured",
        ["emulated", "round trip ms", "jitter ms", "Mbit/s up", "Mbit/s down"],
        [
            [
                "no"
                if link["emulated_rtt_ms"] is None
                else f"{link['emulated_rtt_ms']:g} ms, {rate(link['emulated_mbps'])} Mbit/s",
                f"{link['rtt_ms']:.1f}",
                f"{link['jitter_ms']:.1f}",
                rate(link["mbps_up"]),
                rate(link["mbps_down"]),
            ]
            for link in result["links"]
        ],
    )
    if result["folds"]:
        show_table(
            "\nCross-validation: tok/s of what was left out of the fit",
            ["round trip ms", "Mbit/s", "nodes", "measured", "predicted", "error"],
            [
                [
                    f"{fold['rtt_ms']:g}",
                    rate(fold["mbps_up"]),
                    str(fold["max_nodes"]),
                    f"{fold['measured_tok_s']:.2f}",
                    f"{fold['predicted_tok_s']:.2f}",
                    f"{fold['error']:+.1%}",
                ]
                for fold in result["folds"]
            ],
        )
    show_table(
        "\nProjected tok/s, with the interval that holds nine of ten",
        ["round trip ms", "Mbit/s", "cut", "nodes", "tok/s", "low", "high"],
        [
            [
                f"{row['rtt_ms']:g}",
                rate(row["mbps"]),
                row["cut"],
                str(row["max_nodes"]),
                *(f"{row[name]:.1f}" for name in ("tok_s", "low", "high")),
            ]
            for row in result["projections"]
        ],
    )
    note(
        f"A step: round trip + {result['fixed_ms']:.1f} ms, with drafts {result['drafting_ms']:.1f} ms more, "
        f"{result['node_ms']:.2f} ms per node, and its bytes over the bandwidth."
    )
    for limit, row in result["acceptance"].items():
        note(f"Up to {limit} nodes: {row['mat']:.2f} tokens and {row['nodes_per_step']:.1f} nodes per step.")
    if result["median_error"] is not None:
        note(
            f"Error of predictions for what was left out: median {result['median_error']:.1%}, "
            f"worst {result['worst_error']:.1%}."
        )
