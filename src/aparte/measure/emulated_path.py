"""Emulated ways to a cloud of several hops: a direct path, or one with a relay that takes the connection.

Every hop is a WAN emulator of its own. What it cannot do is delay a connect, which the kernel answers at once
on loopback; :class:`~aparte.measure.doctor_path.Door` waits for the first hop's round trip in its place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from aparte.errors import UserError
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process

_MOST_HOPS = 4


@dataclass(frozen=True)
class EmulatedPath:
    """``hops_ms`` are round trips from the device on: one hop is a direct path, more are a relayed one."""

    hops_ms: tuple[float, ...]
    mbps: float | None = None

    @classmethod
    def parse(cls, text: str) -> EmulatedPath:
        """Read ``80``, ``20+220`` or ``20+220x100``."""
        hops, separator, rate = text.partition("x")
        try:
            path = cls(tuple(float(hop) for hop in hops.split("+")), float(rate) if separator else None)
        except ValueError:
            raise UserError(
                f"{text!r} is no path: give a round trip in ms, like 80, or with a relay on the way 20+220; "
                "and a bandwidth in Mbit/s after x, if there is one."
            ) from None
        if len(path.hops_ms) > _MOST_HOPS or not all(math.isfinite(hop) for hop in path.hops_ms):
            raise UserError(f"{text!r} is no path: it has one to {_MOST_HOPS} hops, in milliseconds.")
        _ = path.profiles  # says what is impossible about one
        return path

    @property
    def profiles(self) -> tuple[WanProfile, ...]:
        """One link per hop; the bandwidth is that of the last, so that it is charged once."""
        last = len(self.hops_ms) - 1
        return tuple(
            WanProfile(rtt_ms=hop, mbps=self.mbps if number == last else None)
            for number, hop in enumerate(self.hops_ms)
        )

    @property
    def near_ms(self) -> float:
        """Round trip to whoever takes the connection."""
        return self.hops_ms[0]

    def __str__(self) -> str:
        way = " + ".join(f"{hop:g}" for hop in self.hops_ms) + " ms"
        return way if self.mbps is None else f"{way}, {self.mbps:g} Mbit/s"


@contextlib.contextmanager
def emulated_path(to: tuple[str, int], path: EmulatedPath) -> Iterator[str]:
    """Emulators in a row in front of ``to``; gives the ``ws://`` address of the near end."""
    with contextlib.ExitStack() as stack:
        for profile in reversed(path.profiles):
            to = stack.enter_context(wan_process(to, profile))
        yield f"ws://{to[0]}:{to[1]}"
