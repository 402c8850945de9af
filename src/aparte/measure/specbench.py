"""Spec-Bench: MAT, speed and identity by category, for one way of decoding against sequential.

The file's 480 questions fall into six tasks; the eight multi-turn categories are one of them, and their
questions have two turns. Sequential and speculative answers are interleaved question by question, so that
a machine that gets slower during a run slows both.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aparte.answer import Answer, Writer
from aparte.config import Sampling, Stopping
from aparte.errors import UserError
from aparte.measure.prompts import digest
from aparte.speculate.common import CommonTable
from aparte.speculate.drafter import Drafter, make_drafter
from aparte.speculate.neural import TreeModel
from aparte.speculate.settings import Decoding

TASKS = ("multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Question:
    """One question; a multi-turn one has two turns."""

    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """One of :data:`TASKS`."""
        return self.category if self.category in TASKS else "multi-turn"


def load_questions(file: Path) -> list[Question]:
    """Read the JSON lines of Spec-Bench. Raises :class:`UserError` with the line that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The questions in {file} cannot be read: {error}.") from None
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            turns = tuple(str(turn) for turn in data["turns"])
            questions.append(Question(str(data["question_id"]), str(data["category"]), turns))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"Line {number} of {file} is no Spec-Bench question (question_id, category, turns)."
            ) from None
    if not questions:
        raise UserError(f"There are no questions in {file}.")
    return questions


def balanced(questions: Sequence[Question], limit: int | None, seed: int) -> list[Question]:
    """At most ``limit`` questions, as many from each task as possible, drawn by ``seed``."""
    by_task: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_task[question.task].append(question)
    for group in by_task.values():
        random.Random(seed).shuffle(group)
    picked: list[Question] = []
    wanted = len(questions) if limit is None else min(limit, len(questions))
    while len(picked) < wanted:
        for task in sorted(by_task):
            if by_task[task] and len(picked) < wanted:
                picked.append(by_task[task].pop())
    return picked


def fingerprint(questions: Sequence[Question]) -> str:
    """A hash of the prompts, so that two reports can be told to be of the same questions."""
    return digest([question.turns for question in questions])


@dataclass(frozen=True)
class Options:
    """How the questions are answered."""

    decoding: Decoding
    sampling: Sampling
    max_new_tokens: int
    warm: bool
    baseline: bool
    #: Loaded neural models by source, for drafters that need them.
    models: Mapping[str, TreeModel | CommonTable] = field(default_factory=dict)


def run(
    writer: Writer,
    questions: Sequence[Question],
    options: Options,
    *,
    done: Sequence[dict[str, Any]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Answer the questions; yields one row each, those of ``done`` (an earlier run) first."""
    known = {row["id"]: row for row in done}

    def new_drafter(decoding: Decoding) -> Drafter:
        return make_drafter(decoding, models=options.models)

    shared = new_drafter(options.decoding) if options.warm else None
    for number, question in enumerate(questions):
        if progress:
            progress(number, len(questions))
        if question.id in known:
            yield known[question.id]
            continue
        row: dict[str, Any] = {"id": question.id, "task": question.task, "category": question.category}
        if options.baseline:
            answers = _answer(writer, question, Decoding("sequential"), make_drafter, options)
            row["sequential"] = _sums(answers)
            expected = [answer.token_ids for answer in answers]
        answers = _answer(writer, question, options.decoding, lambda d: shared or new_drafter(d), options)
        row["speculative"] = _sums(answers)
        if options.baseline:
            row["identical"] = [answer.token_ids for answer in answers] == expected
        yield row
    if progress:
        progress(len(questions), len(questions))


def _answer(
    writer: Writer,
    question: Question,
    decoding: Decoding,
    drafter_for: Callable[[Decoding], Drafter],
    options: Options,
) -> list[Answer]:
    """One conversation, all turns."""
    writer.forget()
    drafter, messages, answers = drafter_for(decoding), [], []
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        prompt = writer.codec.encode_chat(messages)
        prompt = prompt[-(writer.target.max_context - options.max_new_tokens) :]
        answer = writer.complete(
            prompt,
            drafter,
            sampling=options.sampling,
            decoding=decoding,
            stopping=Stopping(max_new_tokens=options.max_new_tokens),
        )
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


def _sums(answers: Sequence[Answer]) -> dict[str, float]:
    steps = [step for answer in answers for step in answer.steps]
    return {
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "steps": len(steps),
        # Nodes sent ahead for nothing were drafted and wasted too.
        "drafted": sum(step.drafted for step in steps) + sum(answer.stale_nodes for answer in answers),
        "accepted_drafts": sum(max(0, step.accepted - 1) for step in steps),
        "seconds": sum(answer.elapsed_s for answer in answers),
        "prefill_s": sum(answer.ttft_ms / 1e3 for answer in answers),
        "bytes_up": sum(answer.bytes_up for answer in answers),
        "bytes_down": sum(answer.bytes_down for answer in answers),
    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per task and macro average (each task counts the same), as in design section 8."""
    categories = {
        task: _figures([row for row in rows if row["task"] == task])
        for task in TASKS
        if any(row["task"] == task for row in rows)
    }
    keys = {key for figures in categories.values() for key in figures} - {"questions"}
    macro = {
        key: round(sum(figures[key] for figures in categories.values()) / len(categories), 4)
        for key in sorted(keys)
        if all(key in figures for figures in categories.values())
    }
    return {"macro": macro, "categories": categories}


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def total(side: str, key: str) -> float:
        return float(sum(row[side][key] for row in rows))

    tokens, steps = total("speculative", "tokens"), total("speculative", "steps")
    drafted = total("speculative", "drafted")
    figures: dict[str, Any] = {
        "questions": len(rows),
        "mat": round(tokens / steps, 4),
        "nodes_per_step": round(drafted / steps, 3),
        "tok_s": round(tokens / total("speculative", "seconds"), 3),
        "wasted_share": round(1 - total("speculative", "accepted_drafts") / drafted, 4) if drafted else 0.0,
        "bytes_up": int(total("speculative", "bytes_up")),
        "bytes_down": int(total("speculative", "bytes_down")),
    }
    if all("sequential" in row for row in rows):
        sequential = total("sequential", "tokens") / total("sequential", "seconds")
        figures["sequential_tok_s"] = round(sequential, 3)
        figures["speedup"] = round(tokens / total("speculative", "seconds") / sequential, 4)
    return figures
