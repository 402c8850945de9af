"""The runs that the cost model is fitted to: the same answers over one link or many, with and without drafts.

Drafters are those whose trees depend on nothing but text and node limit, so that a link changes when a step
arrives and never what it carries. All links take turns with one answer before the next one begins, in
alternating order, so that a machine that gets slower slows all of them. The first step of an answer carries
the prompt and is left out.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from aparte.address import parse_address
from aparte.answer import Answer, Writer
from aparte.config import Compute, Cut, LinkSettings, Sampling, Stopping, WireName, one_of
from aparte.device import wire_format
from aparte.errors import UserError
from aparte.measure.cloud_process import CloudProcess
from aparte.measure.decomposition import Bandwidth, Parts, decompose_all
from aparte.measure.link_probe import LinkFigures, LinkProbe
from aparte.measure.rtt_model import Run
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint, Progress
from aparte.speculate.common import CommonTable
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.step import ROOT, Step
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec
from aparte.wire.tensors import TensorCodec
from aparte.wire.websocket import WebSocketLink

#: Drafting sources that do the same on every link.
STEADY = ("context", "recycling", "runner-up", "common", "lookahead")
DECODE = "context+recycling+runner-up"
_LAYER_REPEATS = 15


@dataclass(frozen=True)
class Plan:
    """What to run on every link: each prompt with each limit on speculative nodes, 0 being sequential."""

    prompts: Sequence[tuple[int, ...]]
    limits: tuple[int, ...] = (0, 4, 16)
    decode: str = DECODE
    max_new_tokens: int = 32
    repeats: int = 2
    models: Mapping[str, CommonTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.decode.split("+"):
            one_of(name, STEADY, "decoding mode for measuring a link")
        if self.repeats < 1:
            raise UserError(f"--repeats is {self.repeats}; it must be at least 1.")

    def decoding(self, limit: int) -> Decoding:
        """Steps go one at a time: what one costs is the question."""
        if limit == 0:
            return Decoding("sequential", in_flight=1)
        return Decoding(self.decode, max_nodes=limit, in_flight=1)


@dataclass
class Place:
    """A cloud at the end of a link. ``profile`` is what is emulated, if anything is."""

    writer: Writer
    profile: WanProfile | None
    figures: LinkFigures

    @property
    def rtt_ms(self) -> float:
        """As emulated, else as measured."""
        return self.profile.rtt_ms if self.profile else self.figures.rtt_ms

    @property
    def bandwidth(self) -> Bandwidth:
        """As emulated, else as measured."""
        if self.profile:
            return Bandwidth(self.profile.mbps, self.profile.mbps)
        return Bandwidth(self.figures.mbps_up, self.figures.mbps_down)


@dataclass(frozen=True)
class Reach:
    """How to get to a cloud."""

    wire: WireName = "auto"
    token: str | None = None
    ca_file: Path | None = None
    settings: LinkSettings = field(default_factory=LinkSettings)
    pins: tuple[str, ...] = ()


class Device:
    """This side of the model, loaded once for all links."""

    def __init__(
        self, blueprint: Blueprint, name: str, cut: Cut, reach: Reach, progress: Progress | None = None
    ) -> None:
        self.codec = Codec(blueprint.checkpoint.folder)
        self.parts = DeviceParts(blueprint, cut, progress)
        self.reach = reach
        self.fingerprint = take_fingerprint(blueprint, cut, name)
        self._wire = wire_format(reach.wire, blueprint)
        self._cut = cut

    def link(self, url: str, token: str | None = None) -> WebSocketLink:
        """A new connection, not opened yet; with another token than usual, if given."""
        return WebSocketLink(
            url,
            self.fingerprint,
            wire=self._wire,
            width=self.parts.hidden_size,
            token=token or self.reach.token,
            ca_file=self.reach.ca_file,
            pins=self.reach.pins,
            settings=self.reach.settings,
        )

    def probe(self, url: str, token: str | None = None) -> LinkFigures:
        """Measure the way to ``url`` over a connection of its own."""
        link = self.link(url, token)
        link.open()
        try:
            return LinkProbe(link, TensorCodec(self._wire, self.parts.hidden_size).bytes_per_node).figures()
        finally:
            link.close()

    def place(self, url: str, profile: WanProfile | None = None, token: str | None = None) -> Place:
        """Probe the way to ``url``; the writer connects to it when it is first used."""
        figures = self.probe(url, token)
        target = SplitTarget(self.parts, self.link(url, token), self._wire)
        writer = Writer(target, self.codec, str(self._cut), self.reach.settings.prefill_chunk)
        return Place(writer, profile, figures)

    def layer_ms(self) -> float:
        """A layer of the front for one node, the median of some."""
        front = self.parts.front
        cache = front.new_cache()
        state = torch.zeros(1, self.parts.hidden_size, dtype=self.parts.precision.dtype)
        times = []
        for number in range(_LAYER_REPEATS):
            started = time.perf_counter()
            front.forward(cache, Step(number, 0, ROOT, 0, (ROOT,)), state).cpu()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times) / self._cut.front


@contextlib.contextmanager
def emulated(
    device: Device,
    model: str,
    cut: Cut,
    compute: Compute,
    profiles: Sequence[WanProfile],
    progress: Progress | None = None,
) -> Iterator[list[Place]]:
    """A cloud in a process of its own, behind an emulated link of every profile; ended with the block."""
    with contextlib.ExitStack() as stack:
        cloud = stack.enter_context(CloudProcess(model, cut, compute))
        address = parse_address(cloud.url().removeprefix("ws://"))
        places = []
        for number, profile in enumerate(profiles):
            if progress:
                progress("opening links", number, len(profiles))
            host, port = stack.enter_context(wan_process(address, profile))
            place = device.place(f"ws://{host}:{port}", profile, cloud.token)
            stack.callback(place.writer.target.close)
            places.append(place)
        if progress:
            progress("opening links", len(profiles), len(profiles))
        yield places


@dataclass
class Measured:
    """What the runs gave: sums per link, limit and prompt, and where the time of all steps went."""

    runs: list[Run] = field(default_factory=list)
    #: Per step, by limit, on the link that came first.
    parts: dict[int, Parts] = field(default_factory=dict)
    cloud_ms: float = 0.0

    def by_link(self) -> list[Run]:
        """The runs of all prompts of a link and limit as one."""
        return merge(self.runs, lambda run: (run.link, run.limit))


def measure(
    places: Sequence[Place], plan: Plan, progress: Callable[[int, int], None] | None = None
) -> Measured:
    """Write every answer of the plan at every place. Raises :class:`UserError` if none is long enough."""
    runs: list[Run] = []
    parts: dict[int, list[Parts]] = {limit: [] for limit in plan.limits}
    cloud: list[float] = []
    if places:  # the first answer of a process is slow
        _write(places[0].writer, plan.prompts[0], plan, plan.limits[-1])
    rounds = [
        (number, limit)
        for repeat in range(plan.repeats)
        for number in range(len(plan.prompts))
        for limit in _turned(plan.limits, repeat + number)
    ]
    for turn, (number, limit) in enumerate(rounds):
        for done, place in enumerate(places if turn % 2 == 0 else reversed(places), turn * len(places)):
            answer = _write(place.writer, plan.prompts[number], plan, limit)
            if progress:
                progress(done + 1, len(rounds) * len(places))
            if len(answer.steps) < 2:
                continue
            runs.append(_run(answer, place, limit, str(number)))
            if place is places[0]:
                timed = answer.steps[1:]
                parts[limit].append(decompose_all(timed, place.bandwidth).per(len(timed)))
            cloud += [step.timing.cloud_ms for step in answer.steps[1:] if step.nodes == 1]
    if not runs:
        raise UserError(
            "No answer had more than one step, so that there is nothing to measure. Give a larger "
            "--max-new-tokens."
        )
    return Measured(
        merge(runs, lambda run: (run.link, run.limit, run.prompt)),
        {limit: sum(found, Parts()).per(len(found)) for limit, found in parts.items() if found},
        statistics.median(cloud) if cloud else 0.0,
    )


def merge(runs: Sequence[Run], key: Callable[[Run], object]) -> list[Run]:
    """Runs of the same key added up, in the order in which the keys came."""
    found: dict[object, Run] = {}
    for run in runs:
        before = found.get(key(run))
        if before is None:
            found[key(run)] = run
            continue
        sums = {
            name: getattr(before, name) + getattr(run, name)
            for name in ("tokens", "rounds", "nodes", "bytes_up", "bytes_down", "ms")
        }
        prompt = before.prompt if before.prompt == run.prompt else ""
        found[key(run)] = replace(before, **sums, prompt=prompt)
    return list(found.values())


def _write(writer: Writer, prompt: tuple[int, ...], plan: Plan, limit: int) -> Answer:
    """One greedy answer from an empty session, by a drafter that has learned nothing yet."""
    decoding = plan.decoding(limit)
    writer.forget()
    return writer.complete(
        prompt,
        make_drafter(decoding, models=plan.models),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(max_new_tokens=plan.max_new_tokens),
    )


def _run(answer: Answer, place: Place, limit: int, prompt: str) -> Run:
    timed = answer.steps[1:]
    return Run(
        rtt_ms=place.rtt_ms,
        bandwidth=place.bandwidth,
        limit=limit,
        tokens=sum(step.accepted for step in timed),
        rounds=len(timed),
        nodes=sum(step.drafted for step in timed),
        bytes_up=sum(step.timing.bytes_up for step in timed),
        bytes_down=sum(step.timing.bytes_down for step in timed),
        ms=sum(step.step_ms for step in timed),
        prompt=prompt,
    )


def _turned(limits: tuple[int, ...], by: int) -> tuple[int, ...]:
    start = by % len(limits)
    return (*limits[start:], *limits[:start])
