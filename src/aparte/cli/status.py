"""``aparte status``: how a cloud is doing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aparte.cli import options
from aparte.cli.output import print_json, write


def status(
    cloud: Annotated[str, typer.Option(help="ws://host:port or wss://host:port.", show_default=False)],
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    pin: options.Pin = None,
    json: options.Json = False,
) -> None:
    """Ask a server how it is doing: round trip, version, sessions, memory, errors. Sends nothing else."""
    from aparte.measure.doctor_path import Door
    from aparte.measure.status import status_of

    found = status_of(Door(cloud, options.read_token(token_file), tls_ca, pins=tuple(pin or ())))
    if json:
        print_json(found)
    else:
        write(f"{found['url']}\n")
        for name, text in _rows(found).items():
            write(f"  {name.ljust(12)}{text}\n")


def _rows(found: dict[str, Any]) -> dict[str, str]:
    sessions, memory, steps = found["sessions"], found["memory"], found["steps"]
    budget = memory["kv_budget_bytes"]
    error = found["last_error"]
    return {
        "serves": f"{found['model']}, cut {found['cut']}, {found['dtype']}",
        "version": found["version"],
        "round trip": "unknown: it is full" if found["rtt_ms"] is None else f"{found['rtt_ms']:.1f} ms",
        "up for": _duration(found["uptime_s"]),
        "sessions": f"{_count(sessions['connected'])} of {_count(sessions['most'])}, "
        f"{_count(sessions['parked'])} parked",
        "memory": f"{_megabytes(memory['kv_bytes'])} of "
        f"{'no limit' if budget is None else _megabytes(budget)}, "
        f"{_megabytes(memory['kv_idle_bytes'])} idle, {_megabytes(memory['kv_peak_bytes'])} at most, "
        f"{_count(sessions['evicted'])} evicted",
        "steps": f"{_count(steps['answered'])} answered, {_count(steps['waiting'])} waiting, "
        f"{_count(steps['stale'])} stale",
        "errors": ", ".join(f"{code} {_count(count)}" for code, count in found["errors"].items()) or "none",
        "last error": f"{error['code']}, {_duration(error['seconds_ago'])} ago" if error else "none",
    }


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _megabytes(value: float | None) -> str:
    return "?" if value is None else f"{value / 1e6:.1f} MB"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
