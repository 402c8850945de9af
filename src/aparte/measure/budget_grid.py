"""How good the automatic node budget is: against fixed budgets, on links from near to far.

Every answer is really written, with the real trees and the real acceptance of its budget. The link is
simulated (:mod:`aparte.measure.simulated_link`). Budgets take turns on each question and link, in an order
that rotates, so that a machine that gets slower during a run slows all of them. The prompt is read before
that, by the model and by a bridge, so that none of them pays for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aparte.answer import Answer, Writer
from aparte.config import Sampling, Stopping
from aparte.errors import UserError
from aparte.measure.simulated_link import SimulatedLink, link_ms
from aparte.measure.specbench import Question
from aparte.measure.wan_link import WanProfile
from aparte.speculate.budget import NodeBudget
from aparte.speculate.common import CommonTable
from aparte.speculate.drafter import make_drafter
from aparte.speculate.neural import TreeModel
from aparte.speculate.settings import Decoding

#: Nodes per step, at most. Without any it is sequential decoding, which spends no time on drafting either.
FIXED = ("0", "4", "8", "16", "32", "64")
AUTOMATIC = "automatic"
BUDGETS = (*FIXED, AUTOMATIC)
#: Tokens that are written on each question before anything is measured.
WARM_UP_TOKENS = 12
#: The first bandwidth of each round trip is the one that other bandwidths are replayed from.
LINKS = tuple(WanProfile(rtt_ms=rtt, mbps=mbps) for rtt in (5, 20, 80, 150) for mbps in (100, 20, 1000))


def parse_links(text: str | None) -> tuple[WanProfile, ...]:
    """Read ``"80x100,150x20"``: milliseconds of round trip times Mbit/s; without it :data:`LINKS`."""
    if text is None:
        return LINKS
    try:
        pairs = [tuple(map(float, part.split("x"))) for part in text.split(",")]
        links = [WanProfile(rtt_ms=rtt, mbps=mbps) for rtt, mbps in pairs]
    except ValueError:
        raise UserError(
            f"--links {text} is not a list of links, each a round trip in ms and Mbit/s, like 80x100,150x20."
        ) from None
    return tuple(dict.fromkeys(links))


@dataclass(frozen=True)
class Options:
    """How the questions are answered."""

    sampling: Sampling
    max_new_tokens: int
    #: Loaded models by source, as :func:`~aparte.speculate.drafter.make_drafter` takes them.
    models: Mapping[str, TreeModel | CommonTable] = field(default_factory=dict)

    @property
    def replayed(self) -> tuple[str, ...]:
        """Budgets whose trees are the same on every link: measured once per question."""
        neural = any(not isinstance(model, CommonTable) for model in self.models.values())
        return ("0",) if neural else FIXED

    def replayed_after(self, last: WanProfile | None, profile: WanProfile) -> tuple[str, ...]:
        """Budgets whose runs on the link ``last`` stand for ``profile`` too, with its times for the network.

        A neural source drafts as deep as pays, which depends on the time of a step, and that on little
        but the round trip. So with one fixed budgets are measured once per question and round trip.
        """
        if last is None:
            return ()
        return FIXED if last.rtt_ms == profile.rtt_ms else self.replayed


@dataclass(frozen=True)
class Run:
    """One answer. What is ``timed`` leaves out the first step, which carries the prompt."""

    tokens: int
    steps: int
    drafted: int
    timed_tokens: int
    timed_steps: int
    timed_bytes: int
    #: Of the timed steps, without the link: device, number formats, cloud and drafting.
    compute_ms: float
    #: A hash of the token ids.
    digest: str

    @classmethod
    def of(cls, answer: Answer, profile: WanProfile) -> Run:
        """What an answer took that was written over a simulated link."""
        timed = answer.steps[1:]
        size = sum(step.timing.bytes_up + step.timing.bytes_down for step in timed)
        return cls(
            tokens=len(answer.token_ids),
            steps=len(answer.steps),
            drafted=sum(step.drafted for step in answer.steps),
            timed_tokens=sum(step.accepted for step in timed),
            timed_steps=len(timed),
            timed_bytes=size,
            compute_ms=sum(step.step_ms for step in timed) - link_ms(profile, len(timed), size),
            digest=hashlib.sha256(json.dumps(answer.token_ids).encode()).hexdigest()[:16],
        )

    def timed_ms(self, profile: WanProfile) -> float:
        """Time of the timed steps on a link."""
        return self.compute_ms + link_ms(profile, self.timed_steps, self.timed_bytes)


def run(
    writer: Writer,
    link: SimulatedLink,
    questions: Sequence[Question],
    links: Sequence[WanProfile],
    options: Options,
    *,
    done: Sequence[dict[str, Any]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Answer the first turn of every question on every link with every budget.

    Yields one row per question and link; those of ``done``, an earlier run, are not measured again.
    """
    known = {(row["id"], row["rtt_ms"], row["mbps"]): row for row in done}
    # What the automatic budget learns of a link holds from question to question, as it does in use.
    learned = {profile: NodeBudget() for profile in links}
    number = 0
    for question in questions:
        ready, measured, last = False, dict[str, Run](), None
        for profile in links:
            replay = {budget: measured[budget] for budget in options.replayed_after(last, profile)}
            last = profile
            if progress:
                progress(number, len(questions) * len(links))
            row = known.get((question.id, profile.rtt_ms, profile.mbps))
            if row is None:
                if not ready:
                    writer.forget()
                    _write(writer, link, question, FIXED[-1], options, max_new_tokens=WARM_UP_TOKENS)
                    ready = True
                link.profile, writer.budget = profile, learned[profile]
                start = number % len(BUDGETS)
                runs = {
                    budget: replay.get(budget)
                    or Run.of(_write(writer, link, question, budget, options), profile)
                    for budget in (*BUDGETS[start:], *BUDGETS[:start])
                }
                row = {
                    "id": question.id,
                    "task": question.task,
                    "rtt_ms": profile.rtt_ms,
                    "mbps": profile.mbps,
                    "identical": len({one.digest for one in runs.values()}) == 1,
                    "runs": {budget: asdict(runs[budget]) for budget in BUDGETS},
                }
            measured = {budget: Run(**row["runs"][budget]) for budget in BUDGETS}
            number += 1
            yield row
    if progress:
        progress(number, number)


def _write(
    writer: Writer,
    link: SimulatedLink,
    question: Question,
    budget: str,
    options: Options,
    max_new_tokens: int | None = None,
) -> Answer:
    """One answer with a drafter that has learned nothing yet."""
    decoding = _decoding(budget)
    prompt = writer.codec.encode_chat([{"role": "user", "content": question.turns[0]}])
    prompt = prompt[-(writer.target.max_context - options.max_new_tokens) :]
    return writer.complete(
        prompt,
        make_drafter(decoding, models=options.models, clock=link.clock),
        sampling=options.sampling,
        decoding=decoding,
        stopping=Stopping(max_new_tokens=max_new_tokens or options.max_new_tokens),
    )


def _decoding(budget: str) -> Decoding:
    """Steps go one at a time: what a step costs is the question here."""
    if budget == "0":
        return Decoding("sequential", in_flight=1)
    return Decoding("auto", max_nodes=None if budget == AUTOMATIC else int(budget), in_flight=1)
