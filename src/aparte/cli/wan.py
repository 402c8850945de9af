"""``aparte wan``: put an emulated wide-area link in front of a server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Annotated

import typer

from aparte.address import format_address, parse_address
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile

_PARENT_POLL_S = 1.0


def wan(
    to: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server to relay to.")],
    listen: Annotated[
        str,
        typer.Option(
            metavar="PORT", help="Where to listen: PORT (loopback) or HOST:PORT; 0 is any free port."
        ),
    ] = "0",
    rtt: Annotated[
        float, typer.Option(metavar="MS", help="Round trip to add, half each way.")
    ] = WanProfile.rtt_ms,
    jitter: Annotated[
        float, typer.Option(metavar="MS", help="At most so much more each way, at random.")
    ] = WanProfile.jitter_ms,
    mbps: Annotated[
        float | None,
        typer.Option(metavar="MBIT/S", help="Bandwidth of each direction; unlimited if left out."),
    ] = WanProfile.mbps,
    drop_after: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Reset a connection after so many bytes.")
    ] = WanProfile.drop_after,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where it listens as one line of JSON.")
    ] = False,
    exit_with_parent: Annotated[int | None, typer.Option(hidden=True, metavar="PID")] = None,
) -> None:
    """Emulate a WAN: relay TCP with a delay each way, until Ctrl-C.

    Connect to the printed address instead of the server's. Bandwidth and delay hold per connection.
    """
    profile = WanProfile(rtt_ms=rtt, jitter_ms=jitter, mbps=mbps, drop_after=drop_after)
    target = parse_address(to)
    relay = WanRelay(parse_address(listen), target, profile)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: relay.stop())
    if exit_with_parent is not None:
        threading.Thread(target=_stop_with_parent, args=(relay, exit_with_parent), daemon=True).start()
    listening = format_address(relay.address)
    if as_json:
        line = {
            "listening": listening,
            "to": format_address(target),
            "rtt_ms": profile.rtt_ms,
            "jitter_ms": profile.jitter_ms,
            "mbps": profile.mbps,
            "drop_after": profile.drop_after,
        }
        typer.echo(json.dumps(line))
    else:
        typer.echo(
            f"Listening on {listening}, relaying to {format_address(target)}: {profile}. Ctrl-C ends it."
        )
    relay.serve_forever(realtime=True)


def _stop_with_parent(relay: WanRelay, parent_pid: int) -> None:
    """Stop ``relay`` once this process has another parent than ``parent_pid``."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    relay.stop()
