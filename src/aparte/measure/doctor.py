"""Examines the way to a cloud, layer by layer, and says what limits speed.

A relay betrays itself by its handshake. TCP connects to whoever is nearest, so that a connect that takes much
less time than a WebSocket ping, which only the cloud itself answers, means that somebody in between took the
connection: a proxy, a tunnel, a provider's gateway. Paper A saw 78 to 85 ms on direct ports and 200 to 400 ms
behind such a gateway.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from aparte import __version__
from aparte.address import is_loopback
from aparte.errors import AparteError
from aparte.measure.decomposition import Parts
from aparte.measure.doctor_path import Door, Ping, connect_ms, first_byte, ssh_ms, tls_ms
from aparte.measure.link_probe import LinkFigures, jitter
from aparte.wire.frames import PROTOCOL_VERSION

_CONNECTS = 6
_PINGS = 12
#: A ping that takes so much longer than a connect has gone further.
RELAY_MS, _RELAY_SHARE = 3.0, 0.5
#: Shares of a round trip, and of a step, from which something is worth a word.
_JITTER_SHARE, _JITTER_MS = 0.2, 3.0
_TRANSFER_SHARE = 0.25


@dataclass(frozen=True)
class Sample:
    """What writing some tokens over the whole path took: per step, sequential, and with drafts."""

    token_ms: float
    parts: Parts
    tok_s: float
    speculative_tok_s: float | None
    cloud: dict[str, Any]
    device_dtype: str


@dataclass
class Diagnosis:
    """Everything found out, as far as it went. Times in ms, None where not measured."""

    url: str
    tcp_ms: list[float] = field(default_factory=list)
    #: Setting up the SSH connection, where the way leads through one.
    ssh_ms: float | None = None
    tls_ms: list[float] = field(default_factory=list)
    ping_ms: list[float] = field(default_factory=list)
    first_byte_ms: float | None = None
    health: dict[str, Any] = field(default_factory=dict)
    figures: LinkFigures | None = None
    sample: Sample | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Whether the environment names a proxy for this address.
    proxied: bool = False
    #: Why the examination ended early.
    failure: AparteError | None = None

    @property
    def relay_adds_ms(self) -> float | None:
        """How much further the cloud is than whoever takes the connection."""
        if not self.tcp_ms or not self.ping_ms:
            return None
        return max(0.0, min(self.ping_ms) - min(self.tcp_ms))

    @property
    def relayed(self) -> bool | None:
        """Whether somebody between device and cloud takes the connection."""
        if self.proxied:
            return True
        added = self.relay_adds_ms
        if added is None:
            return None
        return added > max(RELAY_MS, _RELAY_SHARE * min(self.tcp_ms))

    @property
    def step_ms(self) -> Parts | None:
        """A sequential step as it is to be expected: the link's figures, and what the sample's clocks say
        of both sides."""
        if self.sample is None or self.figures is None:
            return None
        parts = self.sample.parts
        return Parts(
            parts.device_ms,
            parts.codec_ms,
            parts.cloud_ms,
            parts.queue_ms,
            parts.up_ms,
            parts.down_ms,
            self.figures.rtt_ms,
            parts.rest_ms,
        )

    @property
    def prediction_tok_s(self) -> float | None:
        """Sequential, the prompt left out."""
        step = self.step_ms
        return None if step is None or step.total_ms <= 0 else 1e3 / step.total_ms

    @property
    def limit(self) -> str:
        """What limits speed, in words."""
        step = self.step_ms
        if step is None:
            return ""
        largest, whole = step.largest, step.total_ms
        took = {
            "latency": step.latency_ms,
            "transfer": step.up_ms + step.down_ms,
            "device": step.device_ms,
            "cloud": step.cloud_ms,
            "queue": step.queue_ms,
            "codec": step.codec_ms,
        }[largest]
        return f"{_LIMITS[largest]} ({took:.1f} of {whole:.1f} ms per step). {_ADVICE[largest]}"

    def to_json(self) -> dict[str, Any]:
        """The fields of design section 8, and more."""
        figures, sample, step = self.figures, self.sample, self.step_ms
        return {
            "url": self.url,
            "tcp_rtt_ms": _median(self.tcp_ms),
            "ssh_ms": _rounded(self.ssh_ms),
            "tls_ms": _median(self.tls_ms),
            "ws_rtt_ms": _median(self.ping_ms),
            "jitter_ms": round(jitter(self.ping_ms), 3) if self.ping_ms else None,
            "first_byte_ms": _rounded(self.first_byte_ms),
            "relayed": self.relayed,
            "relay_adds_ms": _rounded(self.relay_adds_ms),
            "mbps_up": _rounded(figures.mbps_up) if figures else None,
            "mbps_down": _rounded(figures.mbps_down) if figures else None,
            "step_rtt_ms": _rounded(figures.rtt_ms) if figures else None,
            "probe_token_ms": _rounded(sample.token_ms) if sample else None,
            "step": step.to_json() if step else None,
            "limit": self.limit,
            "prediction_tok_s": _rounded(self.prediction_tok_s),
            "prediction_speculative_tok_s": _rounded(sample.speculative_tok_s) if sample else None,
            "measured_tok_s": _rounded(sample.tok_s) if sample else None,
            "cloud": sample.cloud if sample else None,
            "device_dtype": sample.device_dtype if sample else None,
            "health": self.health,
            "versions": {
                "aparte": __version__,
                "protocol": PROTOCOL_VERSION,
                "python": platform.python_version(),
            },
            "problems": self.problems,
            "notes": self.notes,
        }


_LIMITS = {
    "latency": "The round trip limits speed",
    "transfer": "Bandwidth limits speed",
    "device": "This device's computing limits speed",
    "cloud": "The cloud's computing limits speed",
    "queue": "Waiting for other sessions of the cloud limits speed",
    "codec": "Number formats limit speed",
}
_ADVICE = {
    "latency": "Speculation (--decode auto) pays one round trip for several tokens; or rent nearer.",
    "transfer": "Send fewer nodes per step (--max-nodes), or find a faster link.",
    "device": "A smaller cut leaves less to compute here.",
    "cloud": "A faster GPU, or a larger cut if this device has time to spare.",
    "queue": "Fewer sessions at a time, or another cloud.",
    "codec": "A 16-bit --wire format takes least.",
}


def examine(door: Door, sample: Callable[[], tuple[LinkFigures, Sample]] | None = None) -> Diagnosis:
    """Look at every layer; stops at the first that fails and says which.

    ``sample`` measures bandwidth and writes some tokens with the device's model, if there is one.
    """
    ping = Ping(door)  # refuses what is no address
    found = Diagnosis(door.url)
    try:
        _examine(door, ping, found, sample)
    except AparteError as error:
        found.failure = error
        found.problems.append(str(error))
    finally:
        ping.close()
    _judge(door, found)
    return found


def _examine(
    door: Door,
    ping: Ping,
    found: Diagnosis,
    sample: Callable[[], tuple[LinkFigures, Sample]] | None,
) -> None:
    if door.behind is None:
        found.proxied = not is_loopback(door.host) and get_proxy(parse_uri(door.url)) is not None
    found.ssh_ms = ssh_ms(door)
    with contextlib.suppress(OSError):  # the link has the words for it
        times = [connect_ms(door) for _ in range(_CONNECTS)]
        found.tcp_ms = [time for time in times if time is not None]
    ping.open()
    ping.times_ms(1)
    found.ping_ms = ping.times_ms(_PINGS)
    ping.close()
    if door.is_tls:
        found.tls_ms = [tls_ms(door) for _ in range(3)]
    with contextlib.suppress(OSError, ValueError):
        found.first_byte_ms, found.health = first_byte(door)
    if sample is None:
        found.notes.append(
            "Without a MODEL neither bandwidth nor compute can be measured; give the one that is served."
        )
        return
    found.figures, found.sample = sample()


def _judge(door: Door, found: Diagnosis) -> None:
    """What is worth a word, in sentences."""
    if found.proxied:
        found.problems.append(
            "The environment sends this connection through a proxy (HTTPS_PROXY and the like), so that "
            "connects and pings may go different ways. Add the host to NO_PROXY to go directly."
        )
    elif found.relayed:
        added = found.relay_adds_ms or 0.0
        if is_loopback(door.host) and not door.near_ms:
            found.problems.append(
                "Something on this machine takes the connection, a tunnel or an emulator, and the cloud is "
                f"{added:.0f} ms behind it. If it is a tunnel, compare with a direct port, if there is one."
            )
        else:
            found.problems.append(
                f"A relay or proxy takes the connection after {min(found.tcp_ms):.0f} ms, and the cloud is "
                f"{added:.0f} ms further. A direct port, where there is one, saves that on every step."
            )
    if found.ping_ms:
        trip, wobble = statistics.median(found.ping_ms), jitter(found.ping_ms)
        if wobble > max(_JITTER_MS, _JITTER_SHARE * trip):
            found.problems.append(
                f"Round trips differ by {wobble:.0f} ms from one to the next, which makes them hard to hide. "
                "On WLAN a cable often helps."
            )
    if not door.is_encrypted:
        found.problems.append(
            "Nothing encrypts the way to this cloud: who listens there learns what it learns, and the token. "
            "Use wss:// or an SSH tunnel."
        )
    step, sample = found.step_ms, found.sample
    if step and (share := (step.up_ms + step.down_ms) / step.total_ms) > _TRANSFER_SHARE:
        found.problems.append(
            f"Transfer takes {share:.0%} of a step of one node: the bandwidth is too low to send many drafts."
        )
    if sample and sample.cloud["dtype"] != sample.device_dtype:
        found.problems.append(
            f"The cloud computes in {sample.cloud['dtype']}, this device in {sample.device_dtype}: the text "
            "may differ from that of the model in one piece."
        )


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
