"""Puts the device's side together: parts, link, tokenizer. Every session is opened through here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from aparte.answer import Writer
from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.config import Cut, LinkSettings, WireName
from aparte.deadline import Deadline
from aparte.errors import UserError
from aparte.fingerprint import WHOLE, Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint, Progress
from aparte.model.shard import digest_of_middle
from aparte.recovery import Recovery
from aparte.target.base import Target
from aparte.target.draft import DraftTarget
from aparte.target.local import LocalTarget
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec
from aparte.wire.failover import Failover
from aparte.wire.link import Link
from aparte.wire.record import Recorder
from aparte.wire.websocket import WebSocketLink


def wire_format(wire: WireName, blueprint: Blueprint) -> str:
    """``auto`` is the 16-bit format of what the model computes in."""
    return blueprint.precision.default_wire if wire == "auto" else wire


def open_writer(
    blueprint: Blueprint,
    name: str,
    cut: Cut,
    *,
    cloud: str | Sequence[str] | None = None,
    wire: WireName = "auto",
    token: str | None = None,
    ca_file: Path | None = None,
    pins: Sequence[str] = (),
    settings: LinkSettings | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
    parts: DeviceParts | None = None,
    record: Recorder | None = None,
    codec: Codec | None = None,
) -> Writer:
    """Load front and back, and reach the middle at ``cloud``, or in this process without it.

    With a ``cloud``, the connection is made and the fingerprints are compared before this returns. Of several
    the first that can be reached is used, and another one when it goes away. ``notice`` is told, in
    sentences, what the user should know about that cloud. ``parts`` are front and back if they are loaded
    already: several writers can share them, and ``codec``. ``record`` keeps every frame that passes.
    """
    settings = settings or LinkSettings()
    number_format = wire_format(wire, blueprint)
    deadline = Deadline(settings.answer_timeout_s)
    _describe(record, "split", name, str(cut), number_format, blueprint)
    link: Link
    if cloud is None:
        engine = load_engine(blueprint, cut, name, progress=progress)
        link = InProcessLink(engine, number_format, record.tape() if record else None)
    else:
        link = _connected(
            cloud,
            blueprint,
            take_fingerprint(blueprint, cut, name),
            number_format,
            token,
            ca_file,
            pins,
            settings,
            deadline,
            notice,
            record,
            manifest=functools.cache(lambda: digest_of_middle(blueprint, cut, progress)),
        )
    codec = codec or Codec(blueprint.checkpoint.folder)
    target = SplitTarget(parts or DeviceParts(blueprint, cut, progress), link, number_format)
    return Writer(target, codec, str(cut), settings.prefill_chunk, recovery=Recovery(settings, deadline))


def open_draft_writer(
    blueprint: Blueprint,
    name: str,
    *,
    rejection: bool = False,
    cloud: str | Sequence[str] | None = None,
    wire: WireName = "auto",
    token: str | None = None,
    ca_file: Path | None = None,
    pins: Sequence[str] = (),
    settings: LinkSettings | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
    record: Recorder | None = None,
    codec: Codec | None = None,
) -> Writer:
    """Reach the verifier of ``blueprint``'s model at ``cloud``, or have one in this process without it.

    With a ``cloud`` nothing of the model is loaded here: what drafts loads what it needs. ``rejection`` is
    how drafts are accepted where tokens are sampled. ``record`` keeps every frame that passes. Several
    writers can share a ``codec``.
    """
    settings = settings or LinkSettings()
    number_format = wire_format(wire, blueprint)
    deadline = Deadline(settings.answer_timeout_s)
    _describe(record, "draft", name, WHOLE, number_format, blueprint)
    link: Link
    if cloud is None:
        from aparte.cloud.verifier import load_verifier

        verifier = load_verifier(blueprint, name, progress=progress)
        link = InProcessLink(verifier, number_format, record.tape() if record else None)
    else:
        link = _connected(
            cloud,
            blueprint,
            take_fingerprint(blueprint, None, name),
            number_format,
            token,
            ca_file,
            pins,
            settings,
            deadline,
            notice,
            record,
        )
    target = DraftTarget(blueprint, link, number_format, rejection=rejection)
    codec = codec or Codec(blueprint.checkpoint.folder)
    return Writer(target, codec, WHOLE, settings.prefill_chunk, recovery=Recovery(settings, deadline))


def open_local_writer(
    blueprint: Blueprint,
    settings: LinkSettings | None = None,
    progress: Progress | None = None,
    codec: Codec | None = None,
) -> Writer:
    """Load the whole model on this machine; nothing is sent anywhere."""
    settings = settings or LinkSettings()
    recovery = Recovery(settings, Deadline(settings.answer_timeout_s))
    codec = codec or Codec(blueprint.checkpoint.folder)
    return Writer(LocalTarget(blueprint, progress), codec, WHOLE, settings.prefill_chunk, recovery=recovery)


def _describe(
    record: Recorder | None, target: str, name: str, cut: str, wire: str, blueprint: Blueprint
) -> None:
    if record is not None:
        record.describe(
            {
                "target": target,
                "model": name,
                "cut": cut,
                "wire": wire,
                "width": blueprint.hidden_size,
                "layers": blueprint.layers,
                "dtype": blueprint.precision.name,
            }
        )


def _connected(
    cloud: str | Sequence[str],
    blueprint: Blueprint,
    fingerprint: Fingerprint,
    number_format: str,
    token: str | None,
    ca_file: Path | None,
    pins: Sequence[str],
    settings: LinkSettings,
    deadline: Deadline,
    notice: Callable[[str], None] | None,
    record: Recorder | None,
    manifest: Callable[[], str] | None = None,
) -> Failover:
    """The connection is made, and both sides mean the same model."""
    link = Failover(
        [
            WebSocketLink(
                url,
                fingerprint,
                wire=number_format,
                width=blueprint.hidden_size,
                token=token,
                ca_file=ca_file,
                pins=pins,
                settings=settings,
                deadline=deadline,
                tape=record.tape() if record else None,
                manifest=manifest,
            )
            for url in ((cloud,) if isinstance(cloud, str) else cloud)
        ],
        nearest=settings.failover == "latency",
    )
    link.open()
    if notice:
        _warn(link.current, blueprint, notice)
    return link


def blueprint_of(target: Target) -> Blueprint:
    """The model that ``target`` writes with."""
    if not isinstance(target, SplitTarget | DraftTarget | LocalTarget):
        raise UserError(f"This command does not know the model of a target called {target.name}.")
    return target.blueprint


def _warn(link: WebSocketLink, blueprint: Blueprint, notice: Callable[[str], None]) -> None:
    ours = blueprint.precision.name
    if link.cloud_dtype != ours:
        notice(
            f"The cloud computes in {link.cloud_dtype}, this device in {ours}: the text may differ from that "
            "of the model in one piece, in either."
        )
    if not link.is_protected:
        notice(
            "Nothing encrypts the way to this cloud: who listens there learns what it learns, and the token. "
            "Use wss:// or an SSH tunnel."
        )
