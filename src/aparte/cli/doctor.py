"""``aparte doctor``: examine the way to a cloud, say what limits speed, and predict it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar, show_table, write
from aparte.config import Compute, Cut

if TYPE_CHECKING:
    from aparte.measure.doctor import Sample
    from aparte.measure.doctor_path import Door
    from aparte.measure.link_probe import LinkFigures


def doctor(
    cloud: Annotated[str, typer.Option(help="ws://host:port or wss://host:port.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="What is served there; for bandwidth and prediction.", show_default=False
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="URL",
            help="Another way to the same cloud, such as a tunnel's end here.",
            show_default=False,
        ),
    ] = None,
    cut: options.CutOption = str(Cut()),
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    pin: options.Pin = None,
    wire: options.Wire = "auto",
    dtype: options.Dtype = Compute.dtype,
    device: options.DeviceOption = Compute.device,
    json: options.Json = False,
) -> None:
    """Examine the way to a cloud: TCP, TLS, WebSocket, a relay in between, bandwidth, one token, and speed.

    Everything that was found out is printed even if the examination ends early.
    """
    from aparte.config import WireName, one_of
    from aparte.measure.doctor import compare, examine
    from aparte.measure.doctor_path import Door

    one_of(wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    compute, wanted = Compute(dtype, device), Cut.parse(cut)  # type: ignore[arg-type]
    pins = tuple(pin or ())
    door = Door(cloud, options.read_token(token_file), tls_ca, pins=pins)

    def sample() -> tuple[LinkFigures, Sample]:
        assert model is not None
        return _sample(model, wanted, compute, wire, door)

    found = examine(door, None if model is None else sample)
    report = found.to_json() | {"compared": None, "comparison": ""}
    if other is not None:
        secured = other.startswith("wss:")
        way = Door(other, door.token, tls_ca if secured else None, pins=pins if secured else ())
        by = examine(way)
        report |= {"compared": by.to_json(), "comparison": compare(found, by)}
    if json:
        print_json(report)
    else:
        _show(report)
    if found.failure is not None:
        raise found.failure


def _sample(model: str, cut: Cut, compute: Compute, wire: str, door: Door) -> tuple[LinkFigures, Sample]:
    from aparte.measure.doctor_sample import take_sample
    from aparte.measure.rtt_runs import Device, Reach
    from aparte.model.needed import needed_by_device
    from aparte.model.parts import Blueprint
    from aparte.model.registry import resolve

    with progress_bar() as progress:
        folder = resolve(model, wanted=needed_by_device(cut), progress=progress)
        reach = Reach(wire, door.token, door.ca_file, door.settings, door.pins)  # type: ignore[arg-type]
        here = Device(Blueprint.open(folder, compute), model, cut, reach, progress)
        progress("measuring the link and writing some tokens", 0, 0)
        return take_sample(here, door.url)


def _show(report: dict[str, Any]) -> None:
    rows = (
        ("TCP connect, ms", "tcp_rtt_ms"),
        ("TLS handshake, ms", "tls_ms"),
        ("WebSocket round trip, ms", "ws_rtt_ms"),
        ("jitter, ms", "jitter_ms"),
        ("first byte of /health, ms", "first_byte_ms"),
        ("round trip of a step, ms", "step_rtt_ms"),
        ("Mbit/s up", "mbps_up"),
        ("Mbit/s down", "mbps_down"),
        ("prompt and first token, ms", "probe_token_ms"),
        ("sequential tok/s, predicted", "prediction_tok_s"),
        ("sequential tok/s, measured", "measured_tok_s"),
        ("with drafts, tok/s", "prediction_speculative_tok_s"),
    )
    show_table(
        report["url"],
        ["", ""],
        [[name, "-" if report[key] is None else f"{report[key]:.1f}"] for name, key in rows],
    )
    relayed = {None: "unknown", True: "yes", False: "no"}[report["relayed"]]
    write(f"Relay or tunnel on the way: {relayed}.\n")
    if report["limit"]:
        write(f"{report['limit']}\n")
    if report["cloud"]:
        served = report["cloud"]
        write(
            f"The cloud serves the same model (configuration {served['model']['config'][:8]}), computes in "
            f"{served['dtype']}, and takes {served['max_nodes']} nodes per step and {served['max_context']} "
            "positions.\n"
        )
    if report["comparison"]:
        write(f"{report['comparison']}\n")
    for problem in report["problems"]:
        write(f"Problem: {problem}\n")
    for remark in report["notes"]:
        note(remark)
