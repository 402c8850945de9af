"""From options to a writer that is ready: what ``generate``, ``chat`` and ``demo`` have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aparte.cli.output import note, progress_bar
from aparte.config import Compute, Cut, Decoding, LinkSettings
from aparte.errors import AparteError, UserError

if TYPE_CHECKING:
    from aparte.answer import Writer
    from aparte.speculate.common import CommonTable
    from aparte.speculate.neural import TreeModel

PRIVACY_LINE = (
    "The cloud receives hidden states, never text. With the model's public weights it can reconstruct the "
    "prompt and the answer from them: see docs/privacy.md before you rely on it."
)


@dataclass(frozen=True)
class Setup:
    """Which model, where its middle is, and how to reach it."""

    model: str
    cut: Cut
    compute: Compute
    cloud: str | None = None
    rtt_ms: float | None = None
    mbps: float | None = None
    wire: str = "auto"
    token: str | None = None
    ca_file: Path | None = None
    settings: LinkSettings = field(default_factory=LinkSettings)

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
    from aparte.measure.wan_link import WanProfile

    one_of(setup.wire, WireName.__args__, "wire format")  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        cloud, token, child = setup.cloud, setup.token, None
        profile = WanProfile(rtt_ms=setup.rtt_ms or 0, mbps=setup.mbps) if setup.emulated else None
        if profile is not None and cloud is not None:
            cloud = _relayed(stack, cloud, profile)
        bars = contextlib.ExitStack()
        stack.callback(bars.close)
        progress = bars.enter_context(progress_bar(quiet))
        from aparte.model.needed import needed_by_device
        from aparte.model.registry import resolve

        # Before anything is started: two processes should not fetch the same model.
        needed = None if cloud is None else needed_by_device(setup.cut)
        folder = resolve(setup.model, wanted=needed, progress=progress)
        if profile is not None and cloud is None:
            progress("starting the cloud", 0, 1)
            child = stack.enter_context(CloudProcess(setup.model, setup.cut, setup.compute, profile))
        from aparte.device import open_writer
        from aparte.model.parts import Blueprint

        notices: list[str] = []
        blueprint = Blueprint.open(folder, setup.compute)
        if child is not None:
            cloud, token = child.url(), child.token
            progress("starting the cloud", 1, 1)
        writer = open_writer(
            blueprint,
            setup.model,
            setup.cut,
            cloud=cloud,
            wire=setup.wire,  # type: ignore[arg-type]
            token=token,
            ca_file=setup.ca_file,
            settings=setup.settings,
            progress=progress,
            notice=notices.append,
        )
        stack.callback(writer.target.close)
        bars.close()  # a live bar would take the answer's standard output
        for notice in notices:
            note(notice)
        if not quiet and cloud is not None:
            note(PRIVACY_LINE)
        yield writer


def load_models(
    decoding: Decoding, setup: Setup, writer: Writer, quiet: bool = False
) -> dict[str, TreeModel | CommonTable]:
    """What ``decoding`` drafts with and has to load first, by source.

    Raises :class:`UserError` if one is asked for by name that there is not; ``auto`` does without.
    """
    from aparte.speculate.common import shipped_table

    models: dict[str, TreeModel | CommonTable] = {}
    table = shipped_table(setup.model)
    if table is not None and (decoding.decode == "auto" or "common" in decoding.sources):
        models["common"] = table
    elif "common" in decoding.sources:
        raise UserError(f"There is no table of the common source for {setup.model}. Use another --decode.")
    if decoding.draft is not None:
        with progress_bar(quiet) as progress:
            from aparte.device import open_draft_model
            from aparte.model.registry import resolve

            folder = resolve(decoding.draft, progress=progress)
            models["model"] = open_draft_model(folder, decoding.draft, setup.compute, writer, progress)
    if "bridge" in decoding.sources:
        models["bridge"] = _load_bridge(setup, writer)
    elif decoding.decode == "auto":
        try:
            models["bridge"] = _load_bridge(setup, writer)
        except MissingBridgeError:
            pass
        except AparteError as error:  # a broken or strange one: worth a word, not the answer
            note(f"Drafting without a bridge. {error}")
    return models


class MissingBridgeError(UserError):
    """No bridge was trained for this model and cut."""


def _load_bridge(setup: Setup, writer: Writer) -> TreeModel:
    from aparte.bridge.file import find_bridge
    from aparte.device import open_bridge

    path = find_bridge(setup.model, setup.cut)
    if path is None:
        raise MissingBridgeError(
            f"There is no bridge for {setup.model} at cut {setup.cut}. Train one with `aparte bridge train "
            f"{setup.model} --cut {setup.cut}`, or use another --decode."
        )
    return open_bridge(path, writer)


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
            "would not match. Run `aparte wan` yourself, or leave them out."
        )
    host, port = stack.enter_context(wan_process((parts.hostname, port), profile))  # type: ignore[arg-type]
    return f"ws://{host}:{port}"
