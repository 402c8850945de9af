"""SPADE measured: one model on the edge drafts, the whole model verifies; against cloud only and edge only.

Every answer is really written, in this process, with the real frames of draft mode; the link's time is added
by arithmetic (:mod:`aparte.measure.simulated_link`). The ways to write take turns on each question, in an
order that rotates, so that a machine that gets slower during a run slows all of them. The prompt is read
before that, by both sides, and reported apart: what the ways differ in is the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aparte.answer import Answer, Writer
from aparte.config import Decoding, Sampling, Stopping
from aparte.errors import UserError
from aparte.measure.simulated_link import SimulatedLink, link_ms
from aparte.measure.specbench import Question
from aparte.speculate.chain import Chain
from aparte.speculate.common import CommonTable
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.neural import TreeModel
from aparte.speculate.voice import Voice, open_voice
from aparte.target.draft import DraftTarget

#: Block lengths of the paper's sweep and around it.
LENGTHS = (1, 2, 4, 6, 8, 12)
CLOUD, EDGE, BARE = "cloud_only", "edge_only", "no_states"
#: Of the block lengths, the one nearest to this is measured without returned states too.
BARE_LENGTH = 4
#: Tokens that are written on each question before anything is measured.
WARM_UP_TOKENS = 8


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read ``"1,2,4"``."""
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        lengths = ()
    if not lengths or not 1 <= lengths[0] <= lengths[-1] <= 64:
        raise UserError(f"--d {text} is not a list of block lengths from 1 to 64, like 1,2,4,8.")
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

    @property
    def bare_length(self) -> int:
        return min(self.lengths, key=lambda length: (abs(length - BARE_LENGTH), length))


@dataclass(frozen=True)
class Run:
    """One answer, without its prompt. Times in ms; ``compute_ms`` is everything but the link."""

    tokens: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    cloud_ms: float = 0.0
    edge_ms: float = 0.0
    compute_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_states: int = 0
    #: A hash of the token ids, and the text where there is a reference to compare it with.
    digest: str = ""
    text: str | None = None

    @classmethod
    def of(cls, answer: Answer, link: SimulatedLink, bytes_states: int) -> Run:
        """What an answer took that was written over a simulated link."""
        steps = answer.steps
        wall_ms = sum(step.step_ms for step in steps)
        # The answer's last step may have been cut; what was accepted of it is what was kept.
        accepted = [min(step.drafted, step.accepted - 1) for step in steps]
        whole = zip(steps[:-1], accepted, strict=False)
        return cls(
            tokens=len(answer.token_ids),
            steps=len(steps),
            drafted=sum(step.drafted for step in steps),
            accepted=sum(accepted),
            rejected=sum(step.drafted > right for step, right in whole),
            cloud_ms=sum(step.timing.cloud_ms for step in steps),
            edge_ms=sum(step.draft_ms for step in steps),
            compute_ms=wall_ms - link_ms(link.profile, len(steps), answer.bytes_up + answer.bytes_down),
            bytes_up=answer.bytes_up,
            bytes_down=answer.bytes_down,
            bytes_states=bytes_states,
            digest=digest(answer.token_ids),
            text=answer.text,
        )


@dataclass(frozen=True)
class Prompt:
    """What reading the prompt took, on both sides."""

    tokens: int
    cloud_ms: float
    edge_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Bench:
    """The sides: ``edge`` is how SPADE is used, ``bare`` the same without returned states."""

    edge: Edge
    bare: Edge
    options: Options
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_states(self) -> bool:
        return self.edge is not self.bare

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of what is measured."""
        ways = [CLOUD, *map(str, self.options.lengths)]
        if self.edge.models:
            ways.insert(1, EDGE)
        return (*ways, BARE) if self.has_states else tuple(ways)

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
        start = number % len(self.ways)
        runs = {way: self._write(way, prompt) for way in (*self.ways[start:], *self.ways[:start])}
        scored = question.id in self.references
        return {
            "id": question.id,
            "task": question.task,
            "scored": scored,
            "prompt": asdict(read),
            "runs": {
                way: {key: value for key, value in asdict(runs[way]).items() if scored or key != "text"}
                for way in self.ways
            },
        }

    def _read(self, edge: Edge, prompt: Sequence[int]) -> Prompt:
        """Have both sides read the prompt, and a few tokens more, so that what needs a first time has it."""
        edge.writer.forget()
        answer = self._answer(edge, prompt, self.options.bare_length, WARM_UP_TOKENS)
        first = answer.steps[0]
        begun = next((place for place, step in enumerate(answer.steps) if step.drafted), 0)
        return Prompt(
            len(prompt),
            first.timing.cloud_ms,
            sum(step.draft_ms for step in answer.steps[: begun + 1]),
            first.timing.bytes_up,
            first.timing.bytes_down,
        )

    def _write(self, way: str, prompt: Sequence[int]) -> Run:
        if way == EDGE:
            return self._alone(prompt)
        edge = self.edge if way.isdecimal() else self.bare
        length = 0 if way == CLOUD else int(way) if way.isdecimal() else self.options.bare_length
        before = edge.bytes_states
        answer = self._answer(edge, prompt, length, self.options.max_new_tokens)
        return Run.of(answer, edge.link, edge.bytes_states - before)

    def _drafter(self, edge: Edge, length: int) -> Drafter:
        if not length:
            return Nothing()
        if self.options.tree:
            decoding = Decoding("+".join(edge.names), max_nodes=length, draft=_needs_a_name(edge.names))
            return make_drafter(decoding, models=edge.models, clock=edge.link.clock)
        return Chain(
            edge.voices(),
            self.options.sampling,
            rejection=self.options.rejection,
            length=length,
            eos=edge.writer.codec.eos,
            clock=edge.link.clock,
        )

    def _answer(self, edge: Edge, prompt: Sequence[int], length: int, count: int) -> Answer:
        """One answer with blocks of ``length``, one step at a time."""
        return edge.writer.complete(
            prompt,
            self._drafter(edge, length),
            sampling=self.options.sampling,
            decoding=Decoding("sequential", max_nodes=max(1, length), in_flight=1),
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


def digest(tokens: Sequence[int]) -> str:
    """A hash of token ids, so that two answers can be told to be the same."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def _needs_a_name(names: Sequence[str]) -> str | None:
    """:class:`Decoding` wants to know which model drafts; here it is loaded already."""
    return "loaded" if "model" in names else None
