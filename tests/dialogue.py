"""The device's side for tests, below the commands: real parts, a real link, no end-of-sequence token."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from websockets.sync.client import ClientConnection, connect

from aparte.config import Cut, LinkSettings, Sampling
from aparte.decode import Committed, Job, PrefillProgress, decode
from aparte.fingerprint import Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.recovery import Recovery
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing
from aparte.step import Step, chain_parents
from aparte.target.base import Target
from aparte.target.local import LocalTarget
from aparte.target.split import DeviceParts, SplitTarget
from aparte.wire.frames import Frame, Hello, StepFrame, Welcome
from aparte.wire.frames import decode as decode_frame
from aparte.wire.frames import encode as encode_frame
from aparte.wire.link import Link
from aparte.wire.websocket import WebSocketLink
from running import FLOAT32

PROMPT = tuple(range(20, 60))

#: For tests of time-outs: no answer to the greeting, none to a step.
NO_GREETING = LinkSettings(connect_timeout_s=0.4)
NO_ANSWER = LinkSettings(connect_timeout_s=10, step_timeout_s=0.4)


def fingerprint_of(folder: Path, cut: Cut | None = None, name: str = "tiny") -> Fingerprint:
    return take_fingerprint(Blueprint.open(folder, FLOAT32), cut or Cut(), name)


def open_link(
    folder: Path,
    url: str,
    *,
    cut: Cut | None = None,
    wire: str = "float32",
    name: str = "tiny",
    token: str | None = None,
    ca_file: Path | None = None,
    pins: Sequence[str] = (),
    settings: LinkSettings | None = None,
) -> WebSocketLink:
    """A link that is not connected yet."""
    blueprint = Blueprint.open(folder, FLOAT32)
    return WebSocketLink(
        url,
        take_fingerprint(blueprint, cut or Cut(), name),
        wire=wire,
        width=blueprint.hidden_size,
        token=token,
        ca_file=ca_file,
        pins=pins,
        settings=settings,
    )


class Device:
    """A split target at the end of ``link``, and one conversation."""

    def __init__(self, folder: Path, link: Link, *, cut: Cut | None = None, wire: str = "float32") -> None:
        self.target: Target = SplitTarget(
            DeviceParts(Blueprint.open(folder, FLOAT32), cut or Cut()), link, wire
        )
        self.session = Session()

    def blocks(
        self,
        prompt: Sequence[int] = PROMPT,
        new_tokens: int = 8,
        drafter: Drafter | None = None,
        chunk: int = 128,
        on_prefill: PrefillProgress | None = None,
        recovery: Recovery | None = None,
    ) -> Iterator[Committed]:
        job = Job(
            tuple(prompt),
            Sampling(),
            new_tokens,
            frozenset(),
            max_nodes=12,
            prefill_chunk=chunk,
            recovery=recovery or Recovery(),
        )
        return decode(self.target, self.session, drafter or Nothing(), job, on_prefill)

    def tokens(self, prompt: Sequence[int] = PROMPT, new_tokens: int = 8, chunk: int = 128) -> list[int]:
        """The answer's tokens; what an earlier answer left in the session is not used."""
        self.session.clear()
        return [token for block in self.blocks(prompt, new_tokens, chunk=chunk) for token in block.tokens]


@functools.cache
def unsplit_tokens(folder: Path, prompt: tuple[int, ...] = PROMPT, new_tokens: int = 8) -> list[int]:
    """What the whole model in this process answers."""
    target = LocalTarget(Blueprint.open(folder, FLOAT32))
    job = Job(prompt, Sampling(), new_tokens, frozenset(), max_nodes=1)
    return [token for block in decode(target, Session(), Nothing(), job) for token in block.tokens]


class RawDevice:
    """Speaks the protocol by hand, also wrongly. Width 32, float32 on the wire."""

    def __init__(self, url: str, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._manager = connect(
            url, additional_headers=headers, compression=None, close_timeout=1, proxy=None
        )
        self.connection: ClientConnection = self._manager.__enter__()

    def send(self, message: Frame | bytes) -> None:
        self.connection.send(message if isinstance(message, bytes) else encode_frame(message))

    def receive(self, timeout_s: float = 10) -> Frame:
        return decode_frame(self.connection.recv(timeout_s, decode=False))

    def greet(self, fingerprint: Fingerprint, wire: str = "float32") -> Welcome:
        self.send(Hello(fingerprint.to_json(), wire))
        frame = self.receive()
        assert isinstance(frame, Welcome), frame
        return frame

    def step(self, number: int, tip: int, count: int = 1, *, epoch: int = 0) -> None:
        self.send(chain(number, tip, count, epoch=epoch))

    def abort(self) -> None:
        """Go away without a word."""
        self.connection.close_socket()

    def close(self) -> None:
        self.connection.close()


def chain(number: int, tip: int, count: int = 1, *, epoch: int = 0, width: int = 32) -> StepFrame:
    """A step of ``count`` nodes of ones below ``tip``, in float32."""
    step = Step(number, epoch, tip, tip + 1, chain_parents(tip, tip + 1, count))
    return StepFrame(step, b"\0\0\x80\x3f" * width * count)


@contextlib.contextmanager
def raw_device(
    url: str, fingerprint: Fingerprint | None = None, token: str | None = None
) -> Iterator[RawDevice]:
    """A connection, greeted if a ``fingerprint`` is given."""
    device = RawDevice(url, token)
    try:
        if fingerprint is not None:
            device.greet(fingerprint)
        yield device
    finally:
        device.close()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A forward pass of a tiny model takes a millisecond; handing it to more threads takes far longer on
    a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Fail unless ``condition`` comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
