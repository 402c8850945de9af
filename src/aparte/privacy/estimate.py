"""How long the parts of an audit will take on this machine, roughly, before they begin.

Passes of the model are counted in tokens times layers and multiplied by what one pass takes here. Training
is bounded by its own limit. Measured against a run of the default model it was right within a factor of two.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from aparte.config import Cut
from aparte.privacy.settings import Scale
from aparte.privacy.specimen import Specimen, side_by_side

#: Tokens and texts of the pass that is timed.
TOKENS, TEXTS = 256, 8
#: What a pass with few tokens costs, in tokens: weights have to be read all the same.
FLOOR = 12
#: Seconds of training per token and pass over the text, on two cores.
TRAINING_S = 1.5e-4


@dataclass(frozen=True)
class Estimate:
    """Seconds for each kind of work. ``unit_s`` is what one token in one layer takes."""

    unit_s: float
    layers: int
    scale: Scale

    @classmethod
    def measure(cls, specimen: Specimen, scale: Scale) -> Estimate:
        """Times a pass through the first layers; the second one counts."""
        tokens = torch.arange(TOKENS) % specimen.vocab_size
        layers, seconds = specimen.first_layers, 0.0
        for _ in range(2):
            started = time.perf_counter()
            specimen.run(layers).forward(side_by_side([TOKENS // TEXTS] * TEXTS), specimen.embedding(tokens))
            seconds = time.perf_counter() - started
        return cls(seconds / TOKENS / len(layers), specimen.layers, scale)

    @property
    def _attacked(self) -> int:
        return self.scale.victims * self.scale.length

    def passes(self, tokens: float, layers: float) -> float:
        return tokens * layers * self.unit_s

    def attack(self, name: str, cut: Cut, tokens: int, *, doubtful: bool = False) -> float:
        """``tokens`` is the attacker's own text, ``doubtful`` whether distances alone will not decide."""
        scale, front = self.scale, cut.front
        pairs = self.passes(tokens, front)
        match name:
            case "vocabulary" if doubtful:
                return pairs + self.passes(scale.doubtful * scale.length, 64 * front + FLOOR * self.layers)
            case "vocabulary":
                return pairs + 10 + self.passes(6 * self._attacked, front)
            case "mlp" | "sequence":
                return pairs + min(scale.limit(tokens), 30 * tokens * TRAINING_S)
            case "gradient":
                return min(scale.seconds, self.passes(3 * scale.steps * scale.descents * scale.length, front))
            case "completion" | "logit_lens":
                steps = scale.length * scale.conversations + scale.answer * max(FLOOR, scale.conversations)
                return self.passes(steps, self.layers)
            case "lm_only":
                return self.passes(self._attacked, self.layers)
            case "linear":
                return pairs + 5
        return 1.0

    def traffic(self) -> float:
        """For one run, with or without a constant shape."""
        scale = self.scale
        steps = scale.traffic_prompts * 3 * (scale.traffic_tokens / 2 + 2 * scale.length / FLOOR)
        return self.passes(steps * FLOOR, self.layers)

    def price(self) -> float:
        scale = self.scale
        read = 2 * scale.price_texts * scale.length
        written = scale.questions * (100 + scale.question_tokens * FLOOR / 4)
        return self.passes(read + written, self.layers)
