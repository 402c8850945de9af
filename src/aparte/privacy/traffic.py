"""Traffic: which of several known prompts is being answered, from the messages' number and sizes.

Source: fingerprinting of speculative decoding, arXiv 2411.01076 (50 prompts). Assumptions: the attacker has
seen answers to each of the prompts, made with other seeds, and sees one more. A network observer outside
TLS sees sizes and times; the cloud sees nodes and commits as well. Cost: two answers per prompt to profile.

Traces are compared step by step; nearest neighbour. What the prompt's own message shows is the same every
time, so a trace that begins otherwise is further away than any that begins alike. Times are left out: in
one process they say nothing of a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aparte.answer import Answer, Writer
from aparte.config import Sampling, Stopping
from aparte.model.parts import Progress
from aparte.privacy.shape import ShapeSettings
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding

#: For the report.
NAME = "traffic"
THREAT = "network"
SOURCE = "arXiv 2411.01076."
ASSUMES = "Earlier answers to each of the prompts; sizes of messages, and for the cloud what is in them."
COST = "Two answers per prompt."

#: The constant shape that is attacked too: as many guesses as there are without it, and the pending token.
SHAPE = ShapeSettings(9)

#: A row of numbers per step.
Steps = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Trace:
    """How an answer's traffic looks to somebody: the message with the prompt, and the steps after it."""

    start: tuple[int, ...]
    steps: Steps


View = Callable[[Answer], Trace]


def network_view(answer: Answer) -> Trace:
    """Bytes per step; TLS hides their content and not their length.

    Those of the result are left out: it has as many nodes, and beside them only digits of the cloud's timing.
    """
    first, *rest = ((step.timing.bytes_up,) for step in answer.steps)
    return Trace(first, rest)


def cloud_view(answer: Answer) -> Trace:
    """Nodes and accepted tokens per step, and the prompt's length in the first."""
    return Trace((answer.prompt_tokens,), blind_view(answer).steps)


def blind_view(answer: Answer) -> Trace:
    """As the cloud's, without the step that carries the prompt: what the answer alone gives away."""
    return Trace((), [(step.nodes, step.accepted) for step in answer.steps[1:]])


VIEWS: dict[str, View] = {"network": network_view, "cloud": cloud_view, "answer_only": blind_view}


@dataclass(frozen=True)
class TrafficSettings:
    """How answers are written for it."""

    new_tokens: int = 32
    temperature: float = 0.3
    #: Fixed, so that both runs have the same budget; an automatic one follows the machine's load.
    nodes: int = 8
    #: Earlier answers that the attacker has to each prompt.
    profiles: int = 2
    decode: str = "auto"


def identify(
    writer: Writer, prompts: Sequence[Sequence[int]], settings: TrafficSettings, seed: int, progress: Progress
) -> dict[str, Any]:
    """Shares of prompts that are told from their traffic: ``top1``, ``top5``, and ``views`` by observer."""
    started = time.perf_counter()
    label, total = "answers for the traffic attack", (settings.profiles + 1) * len(prompts)
    runs: list[list[Answer]] = []
    for run in range(settings.profiles + 1):
        runs.append([])
        for prompt in prompts:
            progress(label, run * len(prompts) + len(runs[-1]), total)
            runs[-1].append(_answer(writer, prompt, settings, seed + run))
    progress(label, total, total)
    *known, seen = runs
    views = {
        name: shares_told(
            [[view(run[place]) for run in known] for place in range(len(prompts))],
            [view(answer) for answer in seen],
        )
        for name, view in VIEWS.items()
    }
    return {
        "top1": views["cloud"]["top1"],
        "top5": views["cloud"]["top5"],
        "exact": views["cloud"]["top1"],
        "views": views,
        "prompts": len(prompts),
        "temperature": settings.temperature,
        "attacker_tokens": sum(len(answer.token_ids) for run in known for answer in run),
        "seconds": round(time.perf_counter() - started, 2),
    }


def shares_told(known: Sequence[Sequence[Trace]], seen: Sequence[Trace]) -> dict[str, float]:
    """How often a known trace of the same prompt is the nearest, and among the nearest five prompts'.

    ``known`` has traces by prompt, ``seen`` one of each prompt. Of several equally near ones each is as good
    as any other: the chance that a draw hits counts.
    """
    first = five = 0.0
    for index, trace in enumerate(seen):
        distances = [min(distance(trace, other) for other in mine) for mine in known]
        nearer = sum(value < distances[index] for value in distances)
        level = sum(value == distances[index] for value in distances)
        first += (nearer == 0) / level
        five += max(0.0, min(1.0, (5 - nearer) / level))
    return {"top1": round(first / len(seen), 4), "top5": round(five / len(seen), 4)}


def distance(left: Trace, right: Trace) -> tuple[float, float]:
    """First the start's difference, then that of the steps: each over the larger value.

    A missing step differs in everything.
    """
    return _difference([left.start], [right.start]), _difference(left.steps, right.steps)


def _difference(left: Steps, right: Steps) -> float:
    total = 0.0
    for step in range(max(len(left), len(right))):
        if step >= min(len(left), len(right)):
            total += len((left or right)[0])
            continue
        for mine, other in zip(left[step], right[step], strict=True):
            total += abs(mine - other) / max(mine, other, 1)
    return round(total, 9)


def _answer(writer: Writer, prompt: Sequence[int], settings: TrafficSettings, seed: int) -> Answer:
    decoding = Decoding(settings.decode, max_nodes=settings.nodes, in_flight=1)
    writer.forget()
    answer = writer.complete(
        prompt,
        make_drafter(decoding),
        sampling=Sampling(temperature=settings.temperature, seed=seed),
        decoding=decoding,
        stopping=Stopping(settings.new_tokens),
    )
    shape = getattr(writer.target, "shape", None)
    if shape is not None:  # what is seen of a step is what was sent, filling and all
        answer.steps = [replace(step, nodes=shape.nodes) for step in answer.steps]
    return answer
