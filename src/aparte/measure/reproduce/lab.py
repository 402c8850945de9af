"""What the sections measure with: the model on both sides, emulated and simulated links, answers in figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from aparte.address import parse_address
from aparte.answer import Answer, Writer
from aparte.config import Sampling, Stopping
from aparte.device import open_writer
from aparte.drafting import DraftPlan
from aparte.drafts import DraftShelf
from aparte.measure.cloud_process import CloudProcess
from aparte.measure.reproduce.prompts import CATEGORIES
from aparte.measure.reproduce.settings import Scale, Settings
from aparte.measure.simulated_link import SimulatedLink, open_simulated
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process
from aparte.model.parts import Blueprint, Progress
from aparte.model.registry import resolve
from aparte.privacy.store import Store
from aparte.speculate.drafter import Drafter, make_drafter
from aparte.speculate.settings import Decoding, Drafting
from aparte.target.split import DeviceParts
from aparte.text.tokenizer import Codec

#: Paper A's link; it does not give a bandwidth.
WAN = WanProfile(rtt_ms=80, mbps=100)
#: Makes a new drafter for an answer of this writer.
NewDrafter = Callable[[Writer], Drafter]


@dataclass(frozen=True)
class Figures:
    """Sums over some answers, without the first step of each, which carries the prompt."""

    tokens: int
    steps: int
    drafted: int
    accepted: int
    #: Steps that committed at least one drafted token.
    hits: int
    #: Most tokens that a step committed.
    peak: int
    ms: float
    bytes_up: int
    bytes_down: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Figures:
        steps = [step for answer in answers for step in answer.steps[1:]]
        return cls(
            tokens=sum(step.accepted for step in steps),
            steps=len(steps),
            drafted=sum(step.drafted for step in steps),
            accepted=sum(step.accepted - 1 for step in steps),
            hits=sum(step.accepted > 1 for step in steps),
            peak=max((step.accepted for step in steps), default=0),
            ms=sum(step.step_ms for step in steps),
            bytes_up=sum(step.timing.bytes_up for step in steps),
            bytes_down=sum(step.timing.bytes_down for step in steps),
        )

    def to_json(self) -> dict[str, Any]:
        steps, tokens = max(1, self.steps), max(1, self.tokens)
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "tok_s": round(1e3 * self.tokens / self.ms, 3) if self.ms else 0.0,
            "mat": round(self.tokens / steps, 4),
            "match_rate": round(self.hits / steps, 4),
            "accepted_share": round(self.accepted / self.drafted, 4) if self.drafted else 0.0,
            "nodes_per_step": round(self.drafted / steps, 3),
            "peak": self.peak,
            "step_ms": round(self.ms / steps, 3),
            "bytes_up_per_token": round(self.bytes_up / tokens, 1),
            "bytes_down_per_token": round(self.bytes_down / tokens, 1),
        }


class Lab:
    """Loads what is asked for when it is first asked for. Use as a context manager: it ends what it started."""

    def __init__(self, settings: Settings, folder: Path, store: Store, progress: Progress) -> None:
        self.settings = settings
        self.folder = folder
        self.store = store
        self.progress = progress
        self._stack = contextlib.ExitStack()
        self._writers: dict[WanProfile, Writer] = {}

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def scale(self) -> Scale:
        return self.settings.scale

    @cached_property
    def model_folder(self) -> Path:
        return resolve(self.settings.model, progress=self.progress)

    @cached_property
    def blueprint(self) -> Blueprint:
        return Blueprint.open(self.model_folder, self.settings.compute)

    @cached_property
    def codec(self) -> Codec:
        return Codec(self.blueprint.checkpoint.folder)

    @cached_property
    def parts(self) -> DeviceParts:
        """Front and back, shared by all writers over emulated links."""
        return DeviceParts(self.blueprint, self.settings.cut, self.progress)

    @cached_property
    def cloud(self) -> CloudProcess:
        """A server in a process of its own."""
        settings = self.settings
        return self._stack.enter_context(CloudProcess(settings.model, settings.cut, settings.compute))

    def emulated(self, profile: WanProfile = WAN) -> Writer:
        """To the server, over a real connection through the WAN emulator."""
        if profile not in self._writers:
            cloud = self.cloud
            url = self.relay(cloud.url(), profile)
            writer = open_writer(
                self.blueprint,
                self.settings.model,
                self.settings.cut,
                cloud=url,
                token=cloud.token,
                parts=self.parts,
            )
            self._stack.callback(writer.target.close)
            self._writers[profile] = writer
        return self._writers[profile]

    def relay(self, url: str, profile: WanProfile) -> str:
        """The emulator in front of ``url``, for as long as the lab is open."""
        address = parse_address(url.split("://")[1])
        host, port = self._stack.enter_context(wan_process(address, profile))
        return f"{url.split('://')[0]}://{host}:{port}"

    @cached_property
    def simulated(self) -> tuple[Writer, SimulatedLink]:
        """Both sides in this process; the time on the link is added by arithmetic."""
        writer, link = open_simulated(
            self.blueprint, self.settings.model, self.settings.cut, progress=self.progress
        )
        self._stack.callback(writer.target.close)
        return writer, link

    def automatic(self, writer: Writer) -> NewDrafter:
        """``--decode auto`` with whatever there is for the model, loaded once."""
        decoding = Decoding("auto")
        shelf = DraftShelf(
            DraftPlan(decoding, Drafting()),
            self.blueprint,
            self.settings.model,
            self.settings.cut,
            "split",
            writer.codec,
            self.settings.compute,
            self.progress,
        )
        models = shelf.models(writer.target, writer.session)
        return lambda _: make_drafter(decoding, models=models)

    def prompts(self, count: int | None = None) -> list[str]:
        """So many of paper A's kinds in turn; by default the scale's number of each."""
        rounds = range(self.scale.prompts_per_category)
        found = [prompts[index] for index in rounds for prompts in CATEGORIES.values()]
        if count is not None and count > len(found):
            found = [prompts[index] for index in range(2) for prompts in CATEGORIES.values()]
        return found[:count]

    def write(
        self,
        writer: Writer,
        text: str,
        decoding: Decoding,
        tokens: int,
        drafter: NewDrafter | None = None,
    ) -> Answer:
        """One greedy answer from an empty session, by a drafter that has learned nothing."""
        writer.forget()
        return writer.complete(
            writer.codec.encode_chat([{"role": "user", "content": text}]),
            make_drafter(decoding) if drafter is None else drafter(writer),
            sampling=Sampling(),
            decoding=decoding,
            stopping=Stopping(max_new_tokens=tokens),
        )

    def counted(self, label: str, items: Sequence[Any]) -> Iterator[Any]:
        """``items`` one by one, with progress."""
        for done, item in enumerate(items):
            self.progress(label, done, len(items))
            yield item
        self.progress(label, len(items), len(items))
