"""``aparte doctor``: examine the way to a cloud, say what limits speed, and predict it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import note, print_json, progress_bar, show_table, write
from aparte.config import Compute, Cut
from aparte.errors import UserError

if TYPE_CHECKING:
    from aparte.measure.doctor import Sample
    from aparte.measure.doctor_path import Door
    from aparte.measure.link_probe import LinkFigures
    from aparte.measure.rtt_runs import Device
    from aparte.model.parts import Progress


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="What is served there; for bandwidth and prediction.", show_default=False
        ),
    ] = None,
    cloud: Annotated[
        str | None,
        typer.Option(help="ws://host:port, wss://host:port or ssh://user@host/port.", show_default=False),
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="MS[+MS…][xMBPS][,…]",
            help="Start a cloud behind an emulated path: 80 is direct, 20+220 has a relay on the way. A "
            "second one after a comma is compared.",
            show_default=False,
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
    ssh: Annotated[
        str | None,
        typer.Option(
            metavar="USER@HOST",
            help="Compare with a tunnel to the same server: user@host[:port], or an ssh:// address.",
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
    from aparte.measure.doctor import examine
    from aparte.measure.doctor_compare import compare, tunnel_costs, weigh_tunnel
    from aparte.measure.doctor_path import Door

    one_of(wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    if (cloud is None) == (emulate is None):
        raise UserError("Give --cloud, to examine the way to it, or --emulate, to make one. One of them.")
    compute, wanted = Compute(dtype, device), Cut.parse(cut)  # type: ignore[arg-type]
    if other is not None and ssh is not None:
        raise UserError("--compare and --ssh both name another way to the cloud. Give one of them.")
    pins = tuple(pin or ())
    with contextlib.ExitStack() as stack:
        if cloud is not None:
            door = Door(cloud, options.read_token(token_file), tls_ca, pins=pins)
            second = None if other is None else _other(other, door)
        else:
            if model is None or other is not None or ssh is not None:
                raise UserError(
                    "--emulate needs the MODEL to serve, and compares with a second path of its own."
                )
            door, second = stack.enter_context(_emulated(model, wanted, compute, emulate or ""))
        sampler = None if model is None else _Sampler(model, wanted, compute, wire, door)
        found = examine(door, sampler.at(door.url) if sampler else None)
        report = found.to_json() | {
            "compared": None,
            "comparison": "",
            "tunnel": None,
            "emulated": emulate,
        }
        if second is not None:
            by = examine(second)
            report |= {"compared": by.to_json(), "comparison": compare(found, by)}
        elif ssh is not None:
            way = Door(_tunnel_url(ssh, door), door.token, tls_ca, pins=pins)
            by = examine(way, sampler.at(way.url) if sampler else None)
            words = weigh_tunnel(found, by, door)
            report |= {"compared": by.to_json(), "comparison": words, "tunnel": tunnel_costs(found, by)}
    if json:
        print_json(report)
    else:
        _show(report)
    if found.failure is not None:
        raise found.failure


def _tunnel_url(ssh: str, door: Door) -> str:
    """The same server through SSH: the port of ``door``, on the other machine's own loopback."""
    if door.behind is not None:
        raise UserError("--cloud leads through SSH already. Give it the direct port, or leave --ssh out.")
    return ssh if "://" in ssh else f"ssh://{ssh}/{door.port}"


def _other(url: str, door: Door) -> Door:
    """Another way to the cloud of ``door``; a tunnel's end here may be without TLS."""
    from aparte.measure.doctor_path import Door

    if url.startswith("wss:"):
        return Door(url, door.token, door.ca_file, pins=door.pins)
    return Door(url, door.token)


@contextlib.contextmanager
def _emulated(model: str, cut: Cut, compute: Compute, text: str) -> Iterator[tuple[Door, Door | None]]:
    """A cloud of our own, and one way or two to it."""
    from aparte.address import parse_address
    from aparte.measure.cloud_process import CloudProcess
    from aparte.measure.doctor_path import Door
    from aparte.measure.emulated_path import EmulatedPath, emulated_path

    paths = [EmulatedPath.parse(part) for part in text.split(",")]
    if len(paths) > 2:
        raise UserError(f"--emulate {text} has {len(paths)} paths; two can be compared.")
    with contextlib.ExitStack() as stack:
        cloud = stack.enter_context(CloudProcess(model, cut, compute))
        address = parse_address(cloud.url().removeprefix("ws://"))
        doors = [
            Door(stack.enter_context(emulated_path(address, path)), cloud.token, near_ms=path.near_ms)
            for path in paths
        ]
        yield doors[0], doors[1] if len(doors) > 1 else None


class _Sampler:
    """Writes some tokens over a way to the cloud; the device's part of the model is loaded once."""

    def __init__(self, model: str, cut: Cut, compute: Compute, wire: str, door: Door) -> None:
        self._model = model
        self._cut = cut
        self._compute = compute
        self._wire = wire
        self._door = door
        self._device: Device | None = None

    def at(self, url: str) -> Callable[[], tuple[LinkFigures, Sample]]:
        """What :func:`~aparte.measure.doctor.examine` calls when it has come so far."""
        return lambda: self._take(url)

    def _take(self, url: str) -> tuple[LinkFigures, Sample]:
        from aparte.measure.doctor_sample import take_sample

        with progress_bar() as progress:
            if self._device is None:
                self._device = self._load(progress)
            progress("measuring the link and writing some tokens", 0, 0)
            return take_sample(self._device, url)

    def _load(self, progress: Progress) -> Device:
        from aparte.measure.rtt_runs import Device, Reach
        from aparte.model.needed import needed_by_device
        from aparte.model.parts import Blueprint
        from aparte.model.registry import resolve

        door = self._door
        folder = resolve(self._model, wanted=needed_by_device(self._cut), progress=progress)
        reach = Reach(self._wire, door.token, door.ca_file, door.settings, door.pins)  # type: ignore[arg-type]
        return Device(Blueprint.open(folder, self._compute), self._model, self._cut, reach, progress)


def _show(report: dict[str, Any]) -> None:
    rows = (
        ("TCP connect, ms", "tcp_rtt_ms"),
        ("SSH connection, ms", "ssh_ms"),
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
    for problem in report["compared"]["problems"] if report["compared"] else ():
        write(f"Problem of the other way: {problem}\n")
    for remark in report["notes"]:
        note(remark)
