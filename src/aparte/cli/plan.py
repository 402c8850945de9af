"""``aparte plan``: memory, bytes, speed and cost of a split, from a model's configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, show_table, write
from aparte.config import Compute, Cut
from aparte.errors import UserError


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset, a folder with config.json, a GGUF file or a hub id.",
            show_default=False,
        ),
    ],
    rtt: Annotated[
        str | None,
        typer.Option(metavar="MS,MS,…", help="Round trips to plan for; the first is the reference."),
    ] = None,
    mbps: Annotated[
        float | None, typer.Option(metavar="N", help="Bandwidth, Mbit/s each way; unlimited without it.")
    ] = None,
    cut: options.CutOption = str(Cut()),
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of cache per user.")] = 2048,
    users: Annotated[int, typer.Option(metavar="N", help="Busy at a time.")] = 1,
    price: Annotated[
        float | None, typer.Option(metavar="PER_HOUR", help="Of the cloud, for the cost of a million tokens.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="DRAFT", help="Small model for draft mode.", show_default=False)
    ] = None,
    mat: Annotated[float | None, typer.Option(help="Tokens per step with speculation.")] = None,
    nodes: Annotated[float | None, typer.Option(help="Speculative nodes per step.")] = None,
    tokens_per_call: Annotated[float | None, typer.Option(help="Draft mode: tokens per cloud call.")] = None,
    draft_length: Annotated[int | None, typer.Option(help="Draft mode: drafted tokens per call.")] = None,
    device_ms: Annotated[float | None, typer.Option(help="A step on the device, ms.")] = None,
    cloud_ms: Annotated[float | None, typer.Option(help="A step on the cloud, ms.")] = None,
    codec_ms: Annotated[float | None, typer.Option(help="Number formats and frames, ms per step.")] = None,
    node_ms: Annotated[float | None, typer.Option(help="One more node on both sides, ms.")] = None,
    device_bandwidth: Annotated[float | None, typer.Option(help="Of the device's memory, GB/s.")] = None,
    cloud_bandwidth: Annotated[float | None, typer.Option(help="Of the cloud's memory, GB/s.")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output of bench step or load with --json.", show_default=False),
    ] = None,
    wire: options.Wire = "auto",
    dtype: options.Dtype = Compute.dtype,
    json: options.Json = False,
) -> None:
    """Plan a split from MODEL's configuration alone: no weights are read, nothing is measured.

    Every assumption is printed with its source and can be replaced.
    """
    from aparte.config import WireName, one_of
    from aparte.measure.plan import REFERENCE_RTT_MS, RTTS_MS, Plan, Question
    from aparte.measure.plan_speed import Own

    one_of(wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    rtts_ms = RTTS_MS if rtt is None else _round_trips(rtt)
    made = Plan(
        Question(
            model=model,
            rtts_ms=rtts_ms,
            reference_rtt_ms=REFERENCE_RTT_MS if rtt is None else rtts_ms[0],
            mbps=mbps,
            cut=Cut.parse(cut),
            context=context,
            users=users,
            price=price,
            dtype=Compute(dtype).dtype,  # type: ignore[arg-type]
            wire=wire,  # type: ignore[arg-type]
            measured=measured,
            draft=draft,
            own=Own(
                device_ms=device_ms,
                cloud_ms=cloud_ms,
                codec_ms=codec_ms,
                node_ms=node_ms,
                mat=mat,
                nodes=nodes,
                device_bandwidth=device_bandwidth,
                cloud_bandwidth=cloud_bandwidth,
                tokens_per_call=tokens_per_call,
                draft_length=draft_length,
            ),
        )
    )
    report = made.to_json()
    if json:
        print_json(report)
        return
    _show(report)


def _round_trips(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--rtt {text} is not a list of milliseconds, like 20,80,150.") from None


def _show(report: dict[str, Any]) -> None:
    """Tables and sentences on standard output, remarks on standard error."""
    show_table(
        f"{report['model']}, cut {report['cut']}, {report['dtype']}, {report['context']} tokens of context, "
        f"GB (10^9 bytes)",
        ["", "layers", "embedding", "head", "cache", "weights + cache", "runtime"],
        [
            [
                side,
                *(f"{report[side][name]:.2f}" for name in ("layers_gb", "embedding_gb", "head_gb", "kv_gb")),
                f"{report[f'{side}_gb']:.2f}",
                f"{report[side]['runtime_gb']:.2f}",
            ]
            for side in ("device", "cloud")
        ],
    )
    times = report["step_ms"]
    write(
        f"\n{report['bytes_per_token']} bytes per token and way ({report['bytes_per_token'] / 1024:g} KB). "
        f"A step takes {times['fixed']:g} ms without the link, {times['cloud']:g} ms of them on the cloud. "
        f"Round trip to cloud compute at {report['reference_rtt_ms']:g} ms: "
        f"{report['rtt_to_compute']:.2g}.\n\n"
    )
    cost = report["price_per_hour"] is not None
    columns = ("sequential", "speculative", "auto")
    show_table(
        f"tok/s per user, {report['users']} busy" + ("; cost of a million tokens" if cost else ""),
        ["round trip ms", *columns, *(f"{name}, cost" for name in columns if cost)],
        [
            [
                f"{row['rtt_ms']:g}",
                *(f"{row[f'{name}_tok_s']:.1f}" for name in columns),
                *(f"{row[f'{name}_cost_per_million']:.2f}" for name in columns if cost),
            ]
            for row in report["projections"]
        ],
    )
    for name, rows in report["fleet"].items():
        write("\n")
        _show_fleet(name, rows, report["users"], report["reference_rtt_ms"])
    if report["compared"]:
        write("\n")
        _show_compared(report["compared"])
    write("\n")
    show_table(
        f"Ways to divide the work at {report['reference_rtt_ms']:g} ms, one user",
        ["mode", "tok/s", "cloud passes per token", "device GB", "cloud GB"],
        [
            [
                mode["mode"],
                f"{mode['tok_s']:.1f}",
                f"{mode['cloud_passes_per_token']:.2f}",
                f"{mode['device_gb']:.2f}",
                f"{mode['cloud_gb']:.2f}",
            ]
            for mode in report["modes"]
        ],
    )
    write("\n")
    for mode in report["modes"]:
        said = f" ({mode['note']})" if mode["note"] else ""
        write(f"{mode['mode']}: the cloud sees {mode['cloud_sees']}{said}.\n")
    write(
        f"\nFastest: {report['fastest']}. Sends no text: {', '.join(report['no_text_sent'])}. "
        f"{report['privacy']}\n"
    )
    if printed := report["printed"]:
        for name in ("device_gb", "bytes_per_token", "rtt_to_compute"):
            row = printed[name]
            write(
                f"{name}: {printed['source']} {row['paper']:g}, here {row['here']:g} "
                f"({row['difference']:+.1%}).\n"
            )
        if printed["note"]:
            write(f"{printed['note']}\n")
    note("")
    note(f"Sizes: {report['source']}. What the times rest on:")
    for one in report["assumptions"]:
        note(f"  {one['name']} = {one['value']:g} {one['unit']}: {one['source']}")


def _show_fleet(name: str, rows: list[dict[str, Any]], users: int, rtt_ms: float) -> None:
    show_table(
        f"{users} users at {rtt_ms:g} ms, {name}, simulated",
        ["replicas", "tok/s", "per user", "step p50 ms", "p95", "queue p95", "busy"],
        [
            [
                str(row["replicas"]),
                f"{row['tok_s']:.1f}",
                f"{row['tok_s'] / users:.2f}",
                *(f"{row[f'{kind}_ms']:.1f}" for kind in ("step_p50", "step_p95", "queue_p95")),
                f"{row['busy']:.0%}",
            ]
            for row in rows
        ],
    )


def _show_compared(rows: list[dict[str, float]]) -> None:
    columns = ("tok_s", "step_p50_ms", "step_p95_ms")
    show_table(
        "The load that was measured, and what the simulation gives for it",
        ["clients", *(f"{name}, {kind}" for name in columns for kind in ("measured", "simulated"))],
        [
            [
                f"{row['clients']:.0f}",
                *(f"{row[kind + name]:.1f}" for name in columns for kind in ("", "simulated_")),
            ]
            for row in rows
        ],
    )
