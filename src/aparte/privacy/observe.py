"""What the cloud sees: the states that the device sends for given texts, and those that the cloud returns.

Texts go through the real stages and the real number format of the wire, with a defence applied to what is
sent. Several texts share a forward pass as branches below the root, which the slot tree keeps apart.

Assumptions: the cloud keeps what it receives and computes. It sees float rows, in the wire's format; it
does not see tokens. Cost: one forward pass of the front per token, and of the middle where its output is
asked for; answers cost a pass of the whole model per token, side by side.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aparte.config import Cut
from aparte.model.parts import Progress
from aparte.privacy.defence import Defence
from aparte.privacy.specimen import Specimen, packs, side_by_side
from aparte.step import ROOT, Step
from aparte.wire.tensors import TensorCodec


@dataclass(frozen=True)
class Seen:
    """One session as the cloud has it, with the truth beside it for scoring.

    ``up`` ``[T, D]`` are the states received and ``down`` ``[T, D]`` those returned, both as they are on
    the wire. ``tokens`` ``[T]`` are what lies behind them and ``answer`` what the device wrote: the tokens
    after the positions ``T - len(answer) .. T - 1``. ``cut`` is where this session was cut.
    """

    tokens: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor | None
    answer: torch.Tensor
    cut: Cut
    #: What the device's back reads, where that is not ``down`` as it stands.
    restored: torch.Tensor | None = None

    def head(self, tokens: int) -> Seen:
        """The first ``tokens`` of it, without answer and what was returned."""
        return Seen(self.tokens[:tokens], self.up[:tokens], None, self.answer[:0], self.cut)


@dataclass(frozen=True)
class Observer:
    """How the device sends: model, cut, number format, defence. The cloud sees what comes of it."""

    specimen: Specimen
    cut: Cut
    wire: str
    defence: Defence
    seed: int = 0
    #: The device's own layers, where they are not those of ``specimen``, which everybody has.
    device: Specimen | None = None

    def watch(
        self,
        texts: Sequence[Sequence[int]],
        *,
        returned: bool = False,
        answer: int = 0,
        label: str = "",
        progress: Progress | None = None,
    ) -> list[Seen]:
        """What is seen of each of ``texts``, in their order.

        With ``returned`` the middle runs too. With ``answer`` the device goes on greedily for so many
        tokens. The same seed draws the same cuts and noise for the same texts.
        """
        drawn = [self._draw(index) for index in range(len(texts))]
        found: dict[int, Seen] = {}
        for cut in dict.fromkeys(drawn):
            mine = [index for index, other in enumerate(drawn) if other == cut and len(texts[index])]
            for pack in packs([len(texts[index]) for index in mine]):
                group = [mine[place] for place in pack]
                session = _Session(self, cut, group, [list(texts[index]) for index in group])
                found |= zip(group, session.run(returned, answer), strict=True)
                if progress:
                    progress(label, len(found), len(texts))
        return [found[index] for index in sorted(found)]

    def _draw(self, index: int) -> Cut:
        cuts = self.defence.cuts(self.cut)
        return cuts[0] if len(cuts) == 1 else random.Random(f"{self.seed} cut {index}").choice(cuts)


class _Session:
    """Several texts side by side through front, wire, middle, wire and back."""

    def __init__(self, observer: Observer, cut: Cut, indices: list[int], texts: list[list[int]]) -> None:
        specimen = observer.specimen
        self._device = device = observer.device or specimen
        self._cut = cut
        self._defence = observer.defence
        self._codec = TensorCodec(observer.wire, specimen.width)
        self._texts = texts
        self._front, self._middle, self._back = device.front(cut), specimen.middle(cut), device.back(cut)
        self._generators = [torch.Generator().manual_seed(_seed(observer.seed, index)) for index in indices]
        self._positions = [0] * len(texts)

    def run(self, returned: bool, answer: int) -> list[Seen]:
        texts, returned = self._texts, returned or answer > 0
        lengths = [len(text) for text in texts]
        step = side_by_side(lengths)
        up, down, hidden = self._through(step, [list(text) for text in texts], returned)
        restored = _split(hidden, lengths)
        answers: list[list[int]] = [[] for _ in texts]
        if answer:
            ends = torch.tensor(lengths).cumsum(0) - 1
            logits = self._device.head(self._back.forward(step, hidden)[ends])
            tips, slots = [int(end) for end in ends], len(step)
            for count in range(answer):
                for mine, token in zip(answers, logits.argmax(1).tolist(), strict=True):
                    mine.append(token)
                if count + 1 == answer:
                    break
                step = Step(count + 2, 0, ROOT, slots, tuple(tips))
                tips, slots = list(step.slots), slots + len(step)
                ups, downs, hidden = self._through(step, [[mine[-1]] for mine in answers], True)
                up = [torch.cat(pair) for pair in zip(up, ups, strict=True)]
                down = [torch.cat(pair) for pair in zip(down, downs, strict=True)]
                logits = self._device.head(self._back.forward(step, hidden))
        return [
            Seen(
                tokens=torch.tensor([*text, *mine[:-1]]),
                up=up[place],
                down=down[place] if returned else None,
                answer=torch.tensor(mine, dtype=torch.long),
                cut=self._cut,
                restored=restored[place] if returned and self._defence.cancels and not answer else None,
            )
            for place, (text, mine) in enumerate(zip(texts, answers, strict=True))
        ]

    def _through(
        self, step: Step, tokens: list[list[int]], returned: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """New tokens of every text: what goes up, what comes down (by text), and what the back reads."""
        ids = torch.tensor([token for row in tokens for token in row])
        sizes = [len(row) for row in tokens]
        hidden = self._front.forward(step, self._device.embedding(ids))
        protected = [
            self._defence.protect(rows, position, generator)
            for rows, position, generator in zip(
                _split(hidden, sizes), self._positions, self._generators, strict=True
            )
        ]
        self._positions = [position + size for position, size in zip(self._positions, sizes, strict=True)]
        sent = self._over(torch.cat(protected))
        mask = torch.cat(protected).float() - hidden.float() if self._defence.cancels else None
        if not returned:
            return _split(sent, sizes), [], sent
        back = self._over(self._middle.forward(step, sent.to(hidden.dtype)))
        restored = back if mask is None else back.to(mask.device).float() - mask
        return _split(sent, sizes), _split(back, sizes), restored.to(hidden.dtype)

    def _over(self, hidden: torch.Tensor) -> torch.Tensor:
        """Through the wire's bytes, one way."""
        return self._codec.decode(self._codec.encode(hidden), len(hidden))


def _seed(seed: int, index: int) -> int:
    return random.Random(f"{seed} noise {index}").getrandbits(62)


def _split(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(rows, sizes))
