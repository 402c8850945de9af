"""The device's side of a connection: what is loaded once, and the way to the rest of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aparte import device
from aparte.answer import Writer
from aparte.connection import Connection
from aparte.errors import UserError
from aparte.measure.decomposition import Bandwidth
from aparte.model.needed import Wanted
from aparte.model.parts import Blueprint, Progress
from aparte.model.registry import resolve
from aparte.model.turns import TurnTaking
from aparte.privacy.guard import check_draws, protect
from aparte.privacy.protection import Protection
from aparte.privacy.shape import ConstantShape
from aparte.privatize.ends import PrivateEnds
from aparte.privatize.use import adopt, hide
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec
from aparte.wire.record import Recorder

if TYPE_CHECKING:
    from aparte.measure.cloud_process import CloudProcess
    from aparte.measure.wan_link import WanProfile


class DeviceSide:
    """Opens sessions of one connection. Close it after them.

    A cloud of our own is in this process, for one session; behind the emulator it is in a process of its own,
    as it would be in real use.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        wanted: Wanted | None = None,
        rejection: bool = False,
        shared: bool = False,
        progress: Progress | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """``wanted`` says what this device has to have of the model while the rest is elsewhere; without it
        that is all. ``rejection`` is how draft mode accepts sampled drafts. ``shared`` is for several
        sessions at a time. ``notice`` is told what the user should know.
        """
        self.connection = connection
        self._rejection = rejection
        self._shared = shared
        self._progress: Progress = progress or (lambda label, done, total: None)
        self._notice: Callable[[str], None] = notice or (lambda sentence: None)
        self._parts: DeviceParts | None = None
        self._shapes: list[ConstantShape] = []
        self._opened = self._closed = False
        self._stack = contextlib.ExitStack()
        #: What keeps every frame, if that is wanted.
        self.recorder = Recorder(connection.record) if connection.record else None
        try:
            self._load(wanted)
        except BaseException:
            self.close()
            raise

    def _load(self, wanted: Wanted | None) -> None:
        connection = self.connection
        self._clouds, self._token = connection.clouds, connection.token
        self._child: CloudProcess | None = None
        profile: WanProfile | None = None
        if connection.emulated:
            from aparte.measure.wan_link import WanProfile

            profile = WanProfile(rtt_ms=connection.rtt_ms or 0, mbps=connection.mbps)
            self._clouds = tuple(self._relayed(cloud, profile) for cloud in connection.clouds)
        # Before anything is started: two processes should not fetch the same model.
        there = bool(self._clouds)
        folder = resolve(connection.model, wanted=wanted if there else None, progress=self._progress)
        if profile is not None and not there:
            from aparte.measure.cloud_process import CloudProcess

            self._progress("starting the cloud", 0, 1)
            cut = None if connection.target == "draft" else connection.cut
            child = CloudProcess(connection.model, cut, connection.compute, profile)
            self._child = self._stack.enter_context(child)
        weightless = connection.target == "draft" and there
        #: The model's configuration, and where its weights are.
        self.blueprint = Blueprint.open(folder, connection.compute, weightless=weightless)
        if connection.target == "split":
            hosted = connection.hosted or connection.cut
            check_draws(connection.protection.defence, hosted, self.blueprint.layers)
        #: The private ends of this device, if it has any.
        self.ends: PrivateEnds | None = None
        if connection.protection.ends is not None:
            self.ends = adopt(self.blueprint, connection.cut, connection.protection.ends)
        #: The model's tokenizer and chat template.
        self.codec = Codec(folder)

    @property
    def cadence(self) -> tuple[int, int]:
        """How many steps of a constant shape missed their time, and of how many."""
        return sum(shape.late for shape in self._shapes), sum(shape.steps for shape in self._shapes)

    def open(self) -> Writer:
        """A further session. With a cloud, the connection is made and both sides mean the same model."""
        connection = self.connection
        if self._child is not None and not self._clouds:
            self._clouds, self._token = (self._child.url(),), self._child.token
            self._progress("starting the cloud", 1, 1)
        writer = self._connected()
        target = writer.target
        try:
            if isinstance(target, SplitTarget):
                self._share(target.parts)
            if self.ends is not None:
                hide(target, self.ends)
            if connection.protection != Protection():
                protect(target, connection.protection, writer.codec)
            shape = target.shape if isinstance(target, SplitTarget) else None
            if isinstance(shape, ConstantShape):
                self._shapes.append(shape)
        except BaseException:
            target.close()
            raise
        if connection.mbps is not None:
            writer.bandwidth = Bandwidth(connection.mbps, connection.mbps)
        self._opened = True
        return writer

    def close(self) -> None:
        """End what was started for the connection. Sessions have to be closed before."""
        self._stack.close()
        if self.recorder is not None:
            self.recorder.close()
            if self.recorder.failure and not self._closed:
                self._notice(self.recorder.failure)
        self._closed = True

    def _connected(self) -> Writer:
        connection = self.connection
        progress = None if self._opened else self._progress
        if connection.target == "local":
            return device.open_local_writer(self.blueprint, connection.link, progress, codec=self.codec)
        reach: dict[str, Any] = {
            "cloud": self._clouds or None,
            "wire": connection.wire,
            "token": self._token,
            "ca_file": connection.ca_file,
            "pins": connection.pins,
            "settings": connection.link,
            "progress": progress,
            "notice": None if self._opened else self._notice,  # told once
            "record": self.recorder,
            "codec": self.codec,
        }
        if connection.target == "draft":
            return device.open_draft_writer(
                self.blueprint, connection.model, rejection=self._rejection, **reach
            )
        return device.open_writer(
            self.blueprint, connection.model, connection.cut, parts=self._parts, **reach
        )

    def _share(self, parts: DeviceParts) -> None:
        if self._parts is None:
            self._parts = parts
            if self._shared:
                parts.front, parts.back = TurnTaking(parts.front), TurnTaking(parts.back)

    def _relayed(self, url: str, profile: WanProfile) -> str:
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
        host, port = self._stack.enter_context(wan_process((parts.hostname, port), profile))
        return f"ws://{host}:{port}"
