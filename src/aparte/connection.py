"""Which model, where the rest of it is, and how to reach it. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from aparte.config import DEFAULT_MODEL, TARGETS, Compute, Cut, LinkSettings, WireName, one_of
from aparte.errors import UserError
from aparte.privacy.protection import Protection


@dataclass(frozen=True)
class Connection:
    """Which model, where its middle (or, in draft mode, all of it) is, and how to reach it."""

    model: str = DEFAULT_MODEL
    cut: Cut = field(default_factory=Cut)
    target: str = TARGETS[0]
    #: Where the first one is away, the next is asked. Without one: a cloud of our own, in this process.
    clouds: tuple[str, ...] = ()
    compute: Compute = field(default_factory=Compute)
    wire: WireName = "auto"
    token: str | None = None
    ca_file: Path | None = None
    link: LinkSettings = field(default_factory=LinkSettings)
    protection: Protection = field(default_factory=Protection)
    pins: tuple[str, ...] = ()
    #: A new file for every frame that is sent or received.
    record: Path | None = None
    #: A round trip and a bandwidth, in 10^6 bits per second each way, to emulate on the way to the cloud. A
    #: cloud of our own is then a process of its own.
    rtt_ms: float | None = None
    mbps: float | None = None
    #: The cut at which the cloud hosts the middle, where a defence drew another one for this connection.
    hosted: Cut | None = None

    def __post_init__(self) -> None:
        one_of(self.target, TARGETS, "target")
        one_of(self.wire, get_args(WireName), "wire format")
        if self.target == "local" and (self.remote or self.cut != Cut()):
            raise UserError(
                "--target local runs the whole model on this machine: nothing is cut, and there is no link. "
                "Leave out --cut, --cloud, --rtt and --mbps, or choose another --target."
            )
        if self.target == "local" and self.record is not None:
            raise UserError("--record keeps what a cloud sees, and --target local has none. Leave one out.")

    @property
    def emulated(self) -> bool:
        """Whether the WAN emulator goes in between."""
        return self.rtt_ms is not None or self.mbps is not None

    @property
    def remote(self) -> bool:
        """Whether the rest of the model is in another process, which serves several sessions."""
        return bool(self.clouds) or self.emulated
