"""Two ways to one cloud, side by side, in words."""

from __future__ import annotations

import statistics
from typing import Any

from aparte.measure.doctor import RELAY_MS, Diagnosis
from aparte.measure.doctor_path import Door
from aparte.measure.link_probe import jitter

#: Of the bandwidth or the speed: a smaller difference is none.
_SHARE = 0.1


def compare(first: Diagnosis, second: Diagnosis) -> str:
    """Which of two ways to the same cloud is the shorter one."""
    if (missing := _missing(first, second)) is not None:
        return missing
    trips = [statistics.median(found.ping_ms) for found in (first, second)]
    noise = _noise_ms(first, second)
    apart = abs(trips[0] - trips[1])
    if apart <= noise:
        return f"Both ways take the same within {noise:.1f} ms: {trips[0]:.1f} and {trips[1]:.1f} ms."
    better, worse = (first, second) if trips[0] < trips[1] else (second, first)
    return f"{better.url} is {apart:.1f} ms per round trip shorter than {worse.url}: {min(trips):.1f} ms."


def tunnel_costs(direct: Diagnosis, tunnel: Diagnosis) -> dict[str, Any]:
    """What the tunnel adds to each round trip, and what it leaves of bandwidth and speed; None where one of
    the two was not measured."""
    return {
        "setup_ms": _rounded(tunnel.ssh_ms),
        "rtt_added_ms": _rounded(_added_ms(direct, tunnel)),
        "up_share": _share(_mbps(tunnel, "up"), _mbps(direct, "up")),
        "down_share": _share(_mbps(tunnel, "down"), _mbps(direct, "down")),
        "speed_share": _share(tunnel.prediction_tok_s, direct.prediction_tok_s),
    }


def weigh_tunnel(direct: Diagnosis, tunnel: Diagnosis, door: Door) -> str:
    """What the tunnel costs against the direct port behind ``door``, and which of them to take."""
    added = _added_ms(direct, tunnel)
    if added is None:
        return _missing(direct, tunnel) or ""
    trips = statistics.median(direct.ping_ms), statistics.median(tunnel.ping_ms)
    noise = _noise_ms(direct, tunnel)
    words = [f"Round trips: {trips[0]:.1f} ms directly, {trips[1]:.1f} ms through the tunnel."]
    dear = added > noise
    if not dear:
        words.append(f"Within the {noise:.1f} ms by which they differ anyway, that is the same.")
    elif trips[0] > 0:
        words.append(f"The tunnel adds {added:.1f} ms to every step, {added / trips[0]:.0%}.")
    if tunnel.ssh_ms is not None:
        words.append(f"To set it up took {tunnel.ssh_ms:.0f} ms, once.")
    for way in ("up", "down"):
        straight, through = _mbps(direct, way), _mbps(tunnel, way)
        if through is None:
            continue
        if straight is None and direct.figures is None:
            continue
        if straight is None:
            words.append(f"Bandwidth {way}: {through:.0f} Mbit/s through the tunnel, more directly.")
            continue
        words.append(f"Bandwidth {way}: {straight:.0f} Mbit/s directly, {through:.0f} through the tunnel.")
        dear |= through < (1 - _SHARE) * straight
    if direct.prediction_tok_s and tunnel.prediction_tok_s:
        words.append(
            f"Token by token that makes {direct.prediction_tok_s:.1f} tok/s directly and "
            f"{tunnel.prediction_tok_s:.1f} through the tunnel."
        )
    if added < -noise:
        words.append("The tunnel is the shorter way; take it.")
    elif not door.is_encrypted:
        words.append("The direct port is not encrypted, so take the tunnel, or serve with TLS and a token.")
    elif not door.is_tls:
        words.append("The direct port is one of this machine, where nothing has to be encrypted.")
    elif dear:
        words.append("The direct port is encrypted as well (TLS), so take that.")
    else:
        words.append("Both are encrypted; take whichever is less trouble.")
    return " ".join(words)


def _missing(first: Diagnosis, second: Diagnosis) -> str | None:
    for found in (first, second):
        if not found.ping_ms:
            return f"{found.url} could not be reached, so that there is nothing to compare."
    return None


def _added_ms(direct: Diagnosis, tunnel: Diagnosis) -> float | None:
    if not direct.ping_ms or not tunnel.ping_ms:
        return None
    return statistics.median(tunnel.ping_ms) - statistics.median(direct.ping_ms)


def _mbps(found: Diagnosis, way: str) -> float | None:
    """None where it was not measured, or is too fast to be."""
    if found.figures is None:
        return None
    return found.figures.mbps_up if way == "up" else found.figures.mbps_down


def _noise_ms(first: Diagnosis, second: Diagnosis) -> float:
    return max(RELAY_MS, *(jitter(found.ping_ms) for found in (first, second)))


def _share(ours: float | None, theirs: float | None) -> float | None:
    return None if not ours or not theirs else round(ours / theirs, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
