"""The whole model in this process, behind the same interface as the split one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from aparte.model.parts import Blueprint, Progress
from aparte.step import Step
from aparte.target.base import Ask, Evaluation, Timing


class LocalTarget:
    """Unsplit: every layer on this machine. For comparison, and as the smallest example of a target."""

    name = "local"
    max_nodes = 4096
    bytes_up = bytes_down = 0  # nothing is sent

    def __init__(self, blueprint: Blueprint, progress: Progress | None = None) -> None:
        self.blueprint = blueprint
        self.max_context = blueprint.max_context
        self.rotary_switch = blueprint.rotary_switch
        self.vocab_size = blueprint.vocab_size
        self._stage = blueprint.stage(range(blueprint.layers), progress)
        self._embed, self._head = blueprint.ends()
        self._cache = self._stage.new_cache()
        self._steps: deque[tuple[Step, Sequence[int], int]] = deque()
        self._fresh = True

    def open(self) -> bool:
        kept, self._fresh = not self._fresh, False
        return kept

    def submit(self, step: Step, tokens: Sequence[int], ask: Ask) -> None:
        self._steps.append((step, tokens, ask.logits_from))

    def collect(self) -> Evaluation:
        step, tokens, logits_from = self._steps.popleft()
        started = time.perf_counter()
        hidden = self._stage.forward(self._cache, step, self._embed(torch.tensor(tokens)))
        logits = self._head(hidden[logits_from:])
        return Evaluation(logits, Timing(device_ms=(time.perf_counter() - started) * 1e3))

    def abandon(self) -> None:
        self._steps.clear()  # none was begun

    def reset(self) -> None:
        self._steps.clear()
        self._cache = self._stage.new_cache()
        self._fresh = True

    def close(self) -> None:
        self.reset()
