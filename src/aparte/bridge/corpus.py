"""The training text of a bridge: conversations that the model writes with itself, and its states on them.

No outside data, unless the user gives texts to ask about. Many conversations are written side by side and
all rows grow in step, so there is no padding: where a turn ends, the template's words are put in and the
other side goes on. The states come from the same forward passes that write the text. One *shard* is one
file of some hundred conversations; a finished shard is never written again, which is what resuming means
here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aparte.bridge.questions import Opening, Questions
from aparte.bridge.teacher import RowsCache, Teacher
from aparte.bridge.template import Template, read_template
from aparte.text.tokenizer import Codec

Progress = Callable[[str, int, int], None]

#: Turns are cut here, and at a part of the conversation's length, so that every one has several.
USER_TOKENS = 120
ANSWER_TOKENS = 320
#: How the user's side is sampled; answers are greedy in half of the rows and sampled in the others.
USER_TEMPERATURE = 1.0
ANSWER_TEMPERATURE = 0.7
MIN_P = 0.05
CANDIDATES = 24


@dataclass(frozen=True)
class Shard:
    """``tokens [R, T]``, ``answer [R, T]`` (True where the model answers), and states ``[R, T, D]``."""

    tokens: torch.Tensor
    answer: torch.Tensor
    front: torch.Tensor
    middle: torch.Tensor
    final: torch.Tensor

    def save(self, path: Path) -> None:
        """Written under another name first, so that a file with the right name is always complete."""
        partial = path.with_suffix(".partial")
        save_file({name: getattr(self, name).contiguous() for name in self.__dataclass_fields__}, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Shard:
        with safe_open(path, framework="pt") as file:
            return cls(*(file.get_tensor(name) for name in cls.__dataclass_fields__))


class _Row:
    """One conversation while it is written: whose turn it is, and which tokens are prescribed."""

    def __init__(self, template: Template, draw: Callable[[], Opening], greedy: bool, length: int) -> None:
        self._template = template
        self._most = min(USER_TOKENS, length // 4), min(ANSWER_TOKENS, 3 * length // 4)
        self._draw = draw
        self._greedy = greedy
        self._prescribed = deque(template.start)
        self._written = 0  # tokens of this turn
        self.answering = False
        self._ask()

    @property
    def temperature(self) -> float:
        """Of the next token; 0 is greedy."""
        if not self.answering:
            return USER_TEMPERATURE
        return 0.0 if self._greedy else ANSWER_TEMPERATURE

    def next(self, chosen: int | None) -> tuple[int, bool]:
        """The token to put in, given what the model chose, and whether it belongs to an answer."""
        if self._prescribed:
            return self._prescribed.popleft(), False
        if chosen is None:
            raise ValueError("A row began with nothing prescribed.")
        self._written += 1
        if chosen not in self._template.ends and self._written <= self._most[self.answering]:
            return chosen, self.answering
        # The turn is over. Its end is the model's own choice where it was reached by itself.
        own, between = self.answering, self._template.to_user if self.answering else self._template.to_answer
        self._prescribed.extend(between[1:])
        self.answering = not self.answering
        self._written = 0
        if not self.answering:
            self._ask()
        return between[0], own

    def _ask(self) -> None:
        """Begin a question, and the answer to it if nothing is left to write of it."""
        opening = self._draw()
        self._prescribed.extend(opening.tokens)
        if opening.whole:
            self._prescribed.extend(self._template.to_answer)
            self.answering = True


def write_shard(
    teacher: Teacher,
    folder: Path,
    rows: int,
    length: int,
    seed: int,
    progress: Progress | None = None,
    paragraphs: Sequence[str] = (),
) -> Shard:
    """Let the model write ``rows`` conversations of ``length`` tokens, half of the questions about
    ``paragraphs``, if there are any."""
    codec = Codec(folder)
    template = read_template(codec)
    questions = Questions(codec, paragraphs, seed)
    generator = torch.Generator().manual_seed(seed)
    conversations = [_Row(template, questions.draw, row % 2 == 0, length) for row in range(rows)]
    width = teacher.config.hidden_size
    tokens = torch.zeros(rows, length, dtype=torch.int32)
    answer = torch.zeros(rows, length, dtype=torch.bool)
    states = {
        name: torch.zeros(rows, length, width, dtype=torch.bfloat16) for name in ("front", "middle", "final")
    }
    cache = RowsCache(rows, length)
    chosen: Sequence[int | None] = [None] * rows
    for position in range(length):
        if progress:
            progress("writing conversations", position, length)
        for row, conversation in enumerate(conversations):
            token, answers = conversation.next(chosen[row])
            tokens[row, position] = token
            answer[row, position] = answers
        seen, logits = teacher.step(tokens[:, position].long().to(teacher.device), cache)
        for name, buffer in states.items():
            buffer[:, position] = getattr(seen, name)
        temperatures = torch.tensor([conversation.temperature for conversation in conversations])
        chosen = _choose(logits.float().cpu(), temperatures, generator)
    return Shard(tokens, answer, **states)


def _choose(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> list[int]:
    """One token per row of ``[R, V]``: greedy at temperature 0, else sampled among the likely ones."""
    best = logits.topk(min(CANDIDATES, logits.shape[1]), dim=-1)
    scaled = best.values / temperatures.clamp(min=1e-4)[:, None]
    probabilities = scaled.softmax(dim=-1)
    probabilities[probabilities < MIN_P * probabilities[:, :1]] = 0
    picked = torch.multinomial(probabilities, 1, generator=generator)
    return [int(token) for token in best.indices.gather(1, picked).squeeze(1)]


def write_corpus(
    teacher: Teacher,
    folder: Path,
    out: Path,
    *,
    tokens: int,
    rows: int,
    length: int,
    seed: int,
    progress: Progress | None = None,
    paragraphs: Sequence[str] = (),
) -> Iterator[Path]:
    """Write shards until they hold ``tokens`` tokens; yields each shard's file, those that exist at once."""
    count = -(-tokens // (rows * length))
    for number in range(count):
        path = out / f"shard-{number:03d}.safetensors"
        if not path.exists():
            named = (
                None
                if progress is None
                else lambda what, done, total, number=number: progress(
                    f"{what}, part {number + 1} of {count}", done, total
                )
            )
            write_shard(teacher, folder, rows, length, seed + number, named, paragraphs).save(path)
        yield path
