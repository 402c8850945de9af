"""Questions that a device would be asked: whether a defence changes their answers is part of its price.

Source: Spec-Bench, whose file has an object a line with ``category`` and ``turns``; only first turns are
asked. Assumptions: greedy answers. Cost: a pass of the model per token, of several answers side by side.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aparte.errors import UserError
from aparte.model.parts import Progress
from aparte.privacy.observe import Observer
from aparte.privacy.texts import read_text
from aparte.text.tokenizer import Codec

#: Longer prompts are left out: a summary's source takes minutes to read and says little more of a defence.
LONGEST = 400


@dataclass(frozen=True)
class Question:
    """A first turn, and what kind of task it is."""

    text: str
    category: str = ""


def load_questions(file: Path) -> list[Question]:
    """Raises :class:`UserError` for a file that has no questions."""
    try:
        rows = [json.loads(line) for line in read_text(file).splitlines() if line.strip()]
        questions = [Question(str(row["turns"][0]), str(row.get("category", ""))) for row in rows]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        questions = []
    if not questions:
        raise UserError(
            f"{file} holds no questions. Give a .jsonl file of objects with turns: a list of text."
        )
    return questions


def pick(questions: Sequence[Question], codec: Codec, count: int, seed: int) -> list[list[int]]:
    """Prompts of ``count`` questions as tokens, one of each category in turn, none longer than LONGEST."""
    draw = random.Random(f"{seed} questions")
    kinds: dict[str, list[Question]] = {}
    for question in questions:
        kinds.setdefault(question.category, []).append(question)
    for mine in kinds.values():
        draw.shuffle(mine)
    found: list[list[int]] = []
    while len(found) < count and any(kinds.values()):
        for mine in kinds.values():
            while mine and len(found) < count:
                tokens = codec.encode_chat([{"role": "user", "content": mine.pop().text}])
                if len(tokens) <= LONGEST:
                    found.append(tokens)
                    break
    return found


def answers(
    observer: Observer, prompts: Sequence[Sequence[int]], length: int, progress: Progress
) -> list[torch.Tensor]:
    """Greedy answers of ``length`` tokens each."""
    seen = observer.watch(prompts, answer=length, label="answers to questions", progress=progress)
    return [session.answer for session in seen]


def unchanged(plain: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> dict[str, Any]:
    """How many of the answers, and of their tokens place by place, a defence leaves as they were."""
    if not plain:
        return {"answers_same": None, "answer_tokens_same": None, "questions": 0}
    hits = [mine_of == plain_of for plain_of, mine_of in zip(plain, mine, strict=True)]
    return {
        "answers_same": round(sum(bool(hit.all()) for hit in hits) / len(hits), 4),
        "answer_tokens_same": round(float(torch.cat(hits).float().mean()), 4),
        "questions": len(hits),
    }
