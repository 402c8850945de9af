"""SPADE measured: one model on the edge drafts, the whole model verifies; against cloud only and edge only.

Every answer is really written, in this process, with the real frames of draft mode; the link's time is added
by arithmetic (:mod:`aparte.measure.simulated_link`). *Co-located* is the same loop without a link: the
drafter beside the verifier, at the pace that pays there. *Pipelined* is drafting on while a block is being
verified, on a link of each round trip, against the same with one block at a time.

The ways to write take turns on each question, in an order that rotates, so that a machine that gets slower
during a run slows all of them. The prompt is read before that, by both sides, and reported apart: what the
ways differ in is the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aparte.answer import Answer, Writer
from aparte.config import Sampling, Stopping
from aparte.errors import UserError
from aparte.measure.simulated_link import SimulatedLink
from aparte.measure.spade_run import Prompt, Run, digest
from aparte.measure.specbench import Question
from aparte.measure.wan_link import WanProfile
from aparte.speculate.ahead import SendAhead
from aparte.speculate.chain import Chain
from aparte.speculate.common import CommonTable
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.drawn import open_drawn_tree
from aparte.speculate.length import LengthPlan
from aparte.speculate.neural import TreeModel
from aparte.speculate.settings import GOALS, LONGEST_DRAFT, Decoding
from aparte.speculate.voice import Voice, open_voice
from aparte.target.draft import DraftTarget

#: Block lengths of the paper's sweep and around it.
LENGTHS = (1, 2, 4, 6, 8, 12)
CLOUD, EDGE, BARE = "cloud_only", "edge_only", "no_states"
#: The cloud by itself, computing without ``--batch-invariant``.
PLAIN = "cloud_only_plain"
#: Blocks that get as many nodes as are worth it.
AUTO = "automatic"
#: Names of further ways: with a block length, and with a round trip.
COLOCATED, ONE, AHEAD = "colocated {}", "one at a time {}", "pipelined {}"
#: Round trips that speeds are worked out for, and blocks are sent ahead on.
RTTS_MS = (0, 20, 80, 150)
#: Of the block lengths, the one nearest to this is measured without returned states, and pipelined, too.
BARE_LENGTH = 4
#: Tokens that are written on each question before anything is measured.
WARM_UP_TOKENS = 8


def parse_sweep(text: str) -> tuple[tuple[int, ...], bool]:
    """Read ``"1,2,4,auto"``: the lengths, and whether ``auto`` is among them."""
    parts = text.split(",")
    return parse_lengths(",".join(part for part in parts if part != "auto")), "auto" in parts


def parse_lengths(text: str, option: str = "--d") -> tuple[int, ...]:
    """Read ``"1,2,4"``."""
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        lengths = ()
    if not lengths or not 1 <= lengths[0] <= lengths[-1] <= 64:
        raise UserError(f"{option} {text} is not a list of block lengths from 1 to 64, like 1,2,4,8.")
    return lengths


def load_references(file: Path) -> dict[str, str]:
    """The reference of every summarization question that has one, by question id."""
    references = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        data = json.loads(line) if line.strip() else {}
        reference = data.get("reference")
        if data.get("category") == "summarization" and isinstance(reference, list) and reference:
            references[str(data["question_id"])] = str(reference[0])
    return references


@dataclass(frozen=True)
class Edge:
    """One conversation with the verifier, and what drafts in it."""

    writer: Writer
    link: SimulatedLink
    #: Sources in the order of ``--draft``, and the models among them.
    names: tuple[str, ...]
    models: Mapping[str, TreeModel | CommonTable]

    def voices(self) -> list[Voice]:
        """New ones: nothing is learned from answer to answer."""
        return [open_voice(name, self.models) for name in self.names]

    @property
    def bytes_states(self) -> int:
        target = self.writer.target
        return target.bytes_states if isinstance(target, DraftTarget) else 0


@dataclass(frozen=True)
class Options:
    """How the questions are answered."""

    sampling: Sampling
    max_new_tokens: int
    lengths: tuple[int, ...] = LENGTHS
    rejection: bool = False
    #: Trees of ``d`` nodes in place of chains of ``d`` tokens.
    tree: bool = False
    #: Whether blocks with as many nodes as are worth it are measured too; and for what they are.
    auto: bool = False
    goal: str = GOALS[0]
    #: Keep what drafting learns from question to question.
    warm: bool = False
    #: Block lengths that are measured with the drafter beside the verifier.
    colocated: tuple[int, ...] = ()
    #: Blocks under way at a time, for the pipelined ways: as many as pay with None; with 1 there are none.
    in_flight: int | None = 1

    @property
    def bare_length(self) -> int:
        return min(self.lengths, key=lambda length: (abs(length - BARE_LENGTH), length))


@dataclass(frozen=True)
class Way:
    """How an answer is written: blocks of ``length``, on a link ``profile`` or, without one, the edge's.

    None is a length that is decided block by block. ``ahead`` is what decides about sending ahead, where that
    is done.
    """

    length: int | None
    profile: WanProfile | None = None
    ahead: SendAhead | None = None
    bare: bool = False
    plain: bool = False


@dataclass
class Bench:
    """The sides: ``edge`` is how SPADE is used, ``bare`` the same without returned states.

    ``plain`` has a verifier that computes without ``--batch-invariant``, where the others do with it: what
    they save is reported against that one too.
    """

    edge: Edge
    bare: Edge
    options: Options
    references: Mapping[str, str] = field(default_factory=dict)
    plain: Edge | None = None

    def __post_init__(self) -> None:
        # What is learned of a link holds from question to question, as it does in use.
        self._learned = {rtt: SendAhead() for rtt in RTTS_MS}
        self._plan = LengthPlan(spares_cloud=self.options.goal == "cloud")
        self._warm: dict[Way, Drafter] = {}

    @property
    def has_states(self) -> bool:
        return self.edge is not self.bare

    @property
    def ways(self) -> dict[str, Way | None]:
        """What is measured, by name; None is the draft alone."""
        options = self.options
        ways: dict[str, Way | None] = {CLOUD: Way(0, bare=True)}
        if self.plain is not None:
            ways[PLAIN] = Way(0, plain=True)
        if self.edge.models:
            ways[EDGE] = None
        ways |= {str(length): Way(length) for length in options.lengths}
        if options.auto:
            ways[AUTO] = Way(None)
        if self.has_states:
            ways[BARE] = Way(options.bare_length, bare=True)
        ways |= {COLOCATED.format(length): Way(length, WanProfile()) for length in options.colocated}
        if options.in_flight != 1:
            for rtt in RTTS_MS:
                link = replace(self.edge.link.profile, rtt_ms=rtt)
                ways[ONE.format(rtt)] = Way(options.bare_length, link)
                ways[AHEAD.format(rtt)] = Way(options.bare_length, link, self._learned[rtt])
        return ways

    def run(
        self,
        questions: Sequence[Question],
        *,
        done: Sequence[dict[str, Any]] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Answer the first turn of every question in every way; one row each, those of ``done`` first."""
        known = {row["id"]: row for row in done}
        for number, question in enumerate(questions):
            if progress:
                progress(number, len(questions))
            yield known.get(question.id) or self.row(question, number)
        if progress:
            progress(len(questions), len(questions))

    def row(self, question: Question, number: int) -> dict[str, Any]:
        """One question in every way; ``number`` turns their order."""
        writer = self.edge.writer
        prompt = writer.codec.encode_chat([{"role": "user", "content": question.turns[0]}])
        prompt = prompt[-(writer.target.max_context - self.options.max_new_tokens) :]
        read = self._read(self.edge, prompt)
        if self.has_states:
            self._read(self.bare, prompt)
        if self.plain is not None:
            self._read(self.plain, prompt)
        ways = list(self.ways.items())
        start = number % len(ways)
        runs = {name: self._write(way, prompt) for name, way in (*ways[start:], *ways[:start])}
        scored = question.id in self.references
        return {
            "id": question.id,
            "task": question.task,
            "scored": scored,
            "prompt": asdict(read),
            "runs": {
                name: {key: value for key, value in asdict(runs[name]).items() if scored or key != "text"}
                for name, _ in ways
            },
        }

    def _read(self, edge: Edge, prompt: Sequence[int]) -> Prompt:
        """Have both sides read the prompt, and a few tokens more, so that what needs a first time has it."""
        edge.writer.forget()
        length = 0 if edge is self.plain else self.options.bare_length
        drafter = self._new_drafter(edge, length)
        answer = self._answer(edge, prompt, Way(length), drafter, WARM_UP_TOKENS)
        first = answer.steps[0]
        begun = next((place for place, step in enumerate(answer.steps) if step.drafted), 0)
        return Prompt(
            len(prompt),
            first.timing.cloud_ms,
            sum(step.draft_ms for step in answer.steps[: begun + 1]),
            first.timing.bytes_up,
            first.timing.bytes_down,
        )

    def _write(self, way: Way | None, prompt: Sequence[int]) -> Run:
        if way is None:
            return self._alone(prompt)
        edge = self.plain if way.plain and self.plain else self.bare if way.bare else self.edge
        link, usual = edge.link, edge.link.profile
        link.profile = way.profile or usual
        states, cloud_ms = edge.bytes_states, link.computed_ms
        try:
            answer = self._answer(edge, prompt, way, self._drafter(edge, way), self.options.max_new_tokens)
            link.forget_stale()
            return Run.of(answer, link, link.computed_ms - cloud_ms, edge.bytes_states - states)
        finally:
            link.profile = usual

    def _drafter(self, edge: Edge, way: Way) -> Drafter:
        if not self.options.warm or way.ahead is not None:
            return self._new_drafter(edge, way.length)
        if way not in self._warm:
            self._warm[way] = self._new_drafter(edge, way.length)
        return self._warm[way]

    def _new_drafter(self, edge: Edge, length: int | None) -> Drafter:
        if length == 0:
            return Nothing()
        options = self.options
        plan = self._plan if length is None else None
        if options.tree and not options.sampling.greedy:
            return open_drawn_tree(
                edge.names,
                edge.models,
                options.sampling,
                size=length,
                eos=edge.writer.codec.eos,
                plan=plan,
                clock=edge.link.clock,
            )
        if options.tree:
            return make_drafter(
                _decoding(edge, length),
                models=edge.models,
                clock=edge.link.clock,
                patient=length is None and options.goal == "cloud",
            )
        return Chain(
            edge.voices(),
            options.sampling,
            rejection=options.rejection,
            length=length,
            eos=edge.writer.codec.eos,
            plan=plan,
            clock=edge.link.clock,
        )

    def _answer(self, edge: Edge, prompt: Sequence[int], way: Way, drafter: Drafter, count: int) -> Answer:
        """One answer, the prompt of which is known to both sides or not."""
        if way.ahead is not None:
            edge.writer.ahead = way.ahead
            decoding = _decoding(edge, way.length, self.options.in_flight)
        elif way.length is not None:
            decoding = Decoding("sequential", max_nodes=max(1, way.length), in_flight=1)
        elif self.options.tree and self.options.sampling.greedy:
            decoding = replace(_decoding(edge, None), spares_cloud=self.options.goal == "cloud")
        else:  # these decide themselves how far they go
            decoding = Decoding("sequential", max_nodes=LONGEST_DRAFT, in_flight=1)
        return edge.writer.complete(
            prompt,
            drafter,
            sampling=self.options.sampling,
            decoding=decoding,
            stopping=Stopping(max_new_tokens=count),
        )

    def _alone(self, prompt: Sequence[int]) -> Run:
        """The draft writes the answer: a chain as long as the answer may be, which nobody verifies.

        Its model has read the prompt. It is asked without states of the verifier, who is not there.
        """
        edge, options = self.bare, self.options
        voices = [voice for voice in edge.voices() if voice.is_model]
        chain = Chain(
            voices,
            options.sampling,
            length=options.max_new_tokens,
            eos=edge.writer.codec.eos,
            clock=edge.link.clock,
        )
        started = edge.link.clock()
        tokens = chain.propose(prompt, options.max_new_tokens).tokens
        ms = (edge.link.clock() - started) * 1e3
        return Run(
            tokens=len(tokens),
            edge_ms=ms,
            compute_ms=ms,
            digest=digest(tokens),
            text=edge.writer.codec.decode(list(tokens)),
        )


def _decoding(edge: Edge, length: int | None, in_flight: int | None = 1) -> Decoding:
    """Merged trees of the edge's sources, of ``length`` nodes or as many as the writer's budget allows."""
    # It wants to know which model drafts; here that is loaded already.
    draft = "loaded" if "model" in edge.names else None
    return Decoding("+".join(edge.names), max_nodes=length, draft=draft, in_flight=in_flight)
