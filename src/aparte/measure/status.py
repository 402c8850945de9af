"""How a cloud is doing, by its own account, and how far away it is."""

from __future__ import annotations

import json
import statistics
from typing import Any

from aparte.errors import DoorError, LinkError
from aparte.measure.doctor_path import Door, Ping, get
from aparte.measure.link_probe import jitter
from aparte.wire.link import printable

PINGS = 5
#: The fields of a server's account that are repeated here, and whether each is a text or a number, or an
#: object of such.
WORDS = ("version", "model", "cut", "dtype")
NUMBERS = ("uptime_s", "tokens")
GROUPS = {
    "sessions": ("connected", "parked", "most", "opened", "evicted"),
    "memory": ("kv_bytes", "kv_idle_bytes", "kv_peak_bytes", "kv_budget_bytes"),
    "steps": ("answered", "stale", "waiting"),
}


def status_of(door: Door) -> dict[str, Any]:
    """``rtt_ms``, ``jitter_ms`` and what the server says of itself.

    Raises :class:`LinkError` and :class:`DoorError` as a session's link does. A server that is full is
    asked all the same; then nothing is known of the round trip.
    """
    ping = Ping(door)
    times: list[float] = []
    try:
        ping.open()
        times = ping.times_ms(PINGS)
    except LinkError as error:
        if not error.retry_after_s:
            raise
    finally:
        ping.close()
    try:
        status, body, _ = get(door, "/status", door.token)
    except OSError as error:
        raise LinkError(f"{ping.where} went away ({error.strerror or error}). Ask again.") from None
    if status == 403:
        raise DoorError(
            f"{ping.where} has no tokens and shows its state on its own machine only. Ask there, or serve "
            "with --tokens."
        )
    if status != 200:
        raise LinkError(
            f"{ping.where} does not tell its state (HTTP status {status}); is it the same version of aparte?"
        )
    return {
        "url": door.url,
        "rtt_ms": round(statistics.median(times), 2) if times else None,
        "jitter_ms": round(jitter(times), 2) if times else None,
        **_read(body, ping.where),
    }


def _read(body: bytes, where: str) -> dict[str, Any]:
    """What is expected and of the right kind; a cloud's words are not repeated otherwise."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise LinkError(f"{where} does not tell its state as JSON; is it `aparte serve`?")
    error = told.get("last_error")
    errors = told.get("errors")
    return {
        **{name: _word(told.get(name)) for name in WORDS},
        **{name: _number(told.get(name)) for name in NUMBERS},
        **{
            group: {
                name: _number(told[group].get(name)) if isinstance(told.get(group), dict) else None
                for name in names
            }
            for group, names in GROUPS.items()
        },
        "errors": {
            printable(code[:32]): _number(count)
            for code, count in list(errors.items() if isinstance(errors, dict) else ())[:32]
        },
        "last_error": {"code": _word(error.get("code")), "seconds_ago": _number(error.get("seconds_ago"))}
        if isinstance(error, dict)
        else None,
    }


def _word(value: object) -> str:
    return printable(value[:200]) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
