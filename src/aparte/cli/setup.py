"""From options to a writer that is ready: what ``generate``, ``chat`` and ``demo`` have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aparte.cli.output import note, progress_bar
from aparte.cli.protection import apply, check_draws, privacy_line
from aparte.config import Compute, Cut, Decoding, Drafting, LinkSettings
from aparte.errors import UserError
from aparte.privacy.protection import Protection

if TYPE_CHECKING:
    from aparte.answer import Writer
    from aparte.drafts import Drafts, Model
    from aparte.model.needed import Wanted
    from aparte.model.parts import Blueprint, Progress
    from aparte.wire.record import Recorder

DRAFT_LINE = (
    "Draft mode: the cloud sees the text. It gets the prompt and the answer as tokens; this device only "
    "saves it work. Where the cloud is not to be given text, use --target split."
)


@dataclass(frozen=True)
class Setup:
    """Which model, where its middle (or, in draft mode, all of it) is, and how to reach it."""

    model: str
    cut: Cut
    compute: Compute
    clouds: tuple[str, ...] = ()
    rtt_ms: float | None = None
    mbps: float | None = None
    wire: str = "auto"
    token: str | None = None
    ca_file: Path | None = None
    pins: tuple[str, ...] = ()
    settings: LinkSettings = field(default_factory=LinkSettings)
    target: str = "split"
    drafting: Drafting = field(default_factory=Drafting)
    protection: Protection = field(default_factory=Protection)
    record: Path | None = None
    #: The cut at which the cloud hosts the middle; a defence can draw another one for this session.
    hosted: Cut | None = None

    @property
    def emulated(self) -> bool:
        """True if the WAN emulator goes in between."""
        return self.rtt_ms is not None or self.mbps is not None


@contextlib.contextmanager
def connect(setup: Setup, quiet: bool = False) -> Iterator[Writer]:
    """Load the device's parts and reach the cloud: a given one, one in this process, or, behind the
    emulator, one in a process of its own, as it would be in real use."""
    from aparte.config import WireName, one_of
    from aparte.measure.cloud_process import CloudProcess
    from aparte.measure.decomposition import Bandwidth
    from aparte.measure.wan_link import WanProfile

    one_of(setup.wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(recording(setup, quiet))
        clouds, token, child = setup.clouds, setup.token, None
        profile = WanProfile(rtt_ms=setup.rtt_ms or 0, mbps=setup.mbps) if setup.emulated else None
        if profile is not None:
            clouds = tuple(_relayed(stack, cloud, profile) for cloud in clouds)
        bars = contextlib.ExitStack()
        stack.callback(bars.close)
        progress = bars.enter_context(progress_bar(quiet))
        from aparte.model.registry import resolve

        # Before anything is started: two processes should not fetch the same model.
        folder = resolve(setup.model, wanted=_needed(setup) if clouds else None, progress=progress)
        if profile is not None and not clouds:
            progress("starting the cloud", 0, 1)
            cut = None if setup.target == "draft" else setup.cut
            child = stack.enter_context(CloudProcess(setup.model, cut, setup.compute, profile))
        from aparte.model.parts import Blueprint

        notices: list[str] = []
        weightless = setup.target == "draft" and bool(clouds)
        blueprint = Blueprint.open(folder, setup.compute, weightless=weightless)
        if setup.hosted is not None:
            check_draws(setup.protection.defence, setup.hosted, blueprint.layers)
        if child is not None:
            clouds, token = (child.url(),), child.token
            progress("starting the cloud", 1, 1)
        ends = None
        if setup.protection.ends is not None:
            from aparte.privatize.use import adopt

            ends = adopt(blueprint, setup.cut, setup.protection.ends)
        writer = _open(setup, blueprint, clouds, token, progress, notices.append, record)
        stack.callback(writer.target.close)
        if ends is not None:
            from aparte.privatize.use import hide

            hide(writer.target, ends)
        if setup.mbps is not None:
            writer.bandwidth = Bandwidth(setup.mbps, setup.mbps)
        apply(setup.protection, writer)
        bars.close()  # a live bar would take the answer's standard output
        for notice in notices:
            note(notice)
        if not quiet and setup.target == "draft":
            note(DRAFT_LINE)
        elif not quiet and clouds:
            note(privacy_line(blueprint, setup.hosted or setup.cut, setup.protection.defence, ends))
            if setup.hosted not in (None, setup.cut):
                note(f"The cut of this session is {setup.cut}.")
        yield writer


@contextlib.contextmanager
def recording(setup: Setup, quiet: bool = False) -> Iterator[Recorder | None]:
    """The file that keeps what the cloud sees, if one is wanted."""
    if setup.record is None:
        yield None
        return
    if setup.target == "local":
        raise UserError("--record keeps what a cloud sees, and --target local has none. Leave one out.")
    from aparte.wire.record import Recorder

    recorder = Recorder(setup.record)
    try:
        yield recorder
    finally:
        recorder.close()
        if recorder.failure:
            note(recorder.failure)
        elif setup.target == "draft" and not quiet:
            note(f"{setup.record} holds the text as tokens, as the cloud got it.")


def _open(
    setup: Setup,
    blueprint: Blueprint,
    clouds: tuple[str, ...],
    token: str | None,
    progress: Progress,
    notice: Callable[[str], None],
    record: Recorder | None,
) -> Writer:
    from aparte.device import open_draft_writer, open_local_writer, open_writer

    if setup.target == "local":
        return open_local_writer(blueprint, setup.settings, progress)
    reach: dict[str, Any] = {
        "cloud": clouds or None,
        "wire": setup.wire,
        "token": token,
        "ca_file": setup.ca_file,
        "pins": setup.pins,
        "settings": setup.settings,
        "progress": progress,
        "notice": notice,
        "record": record,
    }
    if setup.target == "draft":
        return open_draft_writer(blueprint, setup.model, setup.drafting, **reach)
    return open_writer(blueprint, setup.model, setup.cut, **reach)


def _needed(setup: Setup) -> Wanted:
    """What this device has to have of the model while the rest is at a cloud."""
    from aparte.bridge.file import find_bridge
    from aparte.model.needed import needed_by_device, needed_to_draft

    if setup.target != "draft":
        return needed_by_device(setup.cut)
    names = setup.drafting.names
    if not names and find_bridge(setup.model, setup.cut) is not None:
        names = ("bridge",)
    return needed_to_draft(setup.cut, names, setup.drafting.layers)


def load_models(decoding: Decoding, setup: Setup, writer: Writer, quiet: bool = False) -> dict[str, Model]:
    """What ``decoding`` drafts with and has to load first, by source.

    Raises :class:`UserError` if one is asked for by name that there is not; ``auto`` does without.
    """
    return open_drafts(decoding, setup, writer, quiet).models


def open_drafts(decoding: Decoding, setup: Setup, writer: Writer, quiet: bool = False) -> Drafts:
    """What drafts for the conversation of ``writer``, loaded."""
    from aparte.device import blueprint_of
    from aparte.drafts import DraftPlan, DraftShelf

    with progress_bar(quiet) as progress:
        shelf = DraftShelf(
            DraftPlan(decoding, setup.drafting),
            blueprint_of(writer.target),
            setup.model,
            setup.cut,
            setup.target,
            writer.codec,
            setup.compute,
            progress,
            notice=note,
        )
    return shelf.open(writer.target, writer.session)


def _relayed(stack: contextlib.ExitStack, url: str, profile: object) -> str:
    from aparte.measure.wan_process import wan_process

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme != "ws" or not parts.hostname:
        raise UserError(
            "--rtt and --mbps emulate a link to ws://host:port addresses only; over TLS the certificate "
            "would not match, and SSH goes its own way. Run `aparte wan` yourself, or leave them out."
        )
    host, port = stack.enter_context(wan_process((parts.hostname, port), profile))  # type: ignore[arg-type]
    return f"ws://{host}:{port}"
