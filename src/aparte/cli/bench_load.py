"""``aparte bench load``: many devices at one cloud."""

from __future__ import annotations

from typing import Annotated

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar, show_table
from aparte.config import Compute, Cut
from aparte.errors import UserError


def load(
    model: options.Model,
    clients: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of devices that write at the same time.")
    ] = "1,2,4,8,16",
    rtt: Annotated[
        float, typer.Option(metavar="MS", help="Emulate this round trip, for each device.")
    ] = 80.0,
    mbps: options.Mbps = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="How long each number of devices writes, per repeat.")
    ] = 10.0,
    repeats: Annotated[int, typer.Option(metavar="N", help="Repeats, in alternating order.")] = 2,
    unsplit: Annotated[
        bool,
        typer.Option(
            "--unsplit",
            help="Also the unsplit model here, in turns; devices then use all the threads they like.",
        ),
    ] = False,
    decode: options.Decode = "sequential",
    max_new_tokens: options.MaxNewTokens = 64,
    cut: options.CutOption = str(Cut()),
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """Speed of all devices together, step time and queueing, by the number of devices.

    Devices are processes with an emulated link each; they, the links and the cloud share this machine.
    """
    from aparte.measure import load as bench
    from aparte.measure.wan_link import WanProfile
    from aparte.model.registry import resolve

    try:
        counts = tuple(dict.fromkeys(int(part) for part in clients.split(",")))
    except ValueError:
        raise UserError(f"--clients {clients} is not a list of numbers from 1 on, like 1,2,4,8.") from None
    wanted = bench.Load(
        model,
        Cut.parse(cut),
        Compute(dtype, device),  # type: ignore[arg-type]
        WanProfile(rtt_ms=rtt, mbps=mbps),
        counts,
        seconds,
        repeats,
        decode,
        max_new_tokens,
        unsplit,
    )
    with progress_bar() as progress:
        resolve(model, progress=progress)  # before many processes want to fetch it
        report = bench.measure(wanted, progress)
    report |= {
        "model": model,
        "cut": cut,
        "dtype": dtype,
        "decode": decode,
        "max_new_tokens": max_new_tokens,
        "link": {"rtt_ms": rtt, "mbps": mbps},
        "seconds": seconds,
        "repeats": repeats,
    }
    if json:
        print_json(report)
        return
    columns = ("tok_s", "ratio_to_one", "step_p50_ms", "step_p95_ms", "queue_p95_ms", "cloud_p50_ms")
    show_table(
        f"{model}, {decode}, {rtt:g} ms, all devices together",
        ["clients", *columns],
        [
            [str(row["clients"]), *("-" if row[name] is None else f"{row[name]:.2f}" for name in columns)]
            for row in report["rows"]
        ],
    )
    if report["one_to_unsplit"] is not None:
        note(
            f"One device has {report['one_to_unsplit']:.0%} of the unsplit model's speed, "
            f"{report['unsplit_tok_s']:.2f} tok/s."
        )
    note(f"Same text in every company: {'yes' if report['identical'] else 'no'}")
