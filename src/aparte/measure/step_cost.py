"""What a step costs by its number of nodes: middle, device, and the unsplit model of ``transformers``.

And what a step of one node costs by the length of the text. Everything is measured in one process, in turns,
and reported as medians, so that a machine that is busy for a while slows all columns alike. No network, no
wire format, no drafter: the forward passes alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from aparte.config import Cut
from aparte.model.cache import SlotCache
from aparte.model.parts import Blueprint, Progress
from aparte.model.stage import Stage
from aparte.step import Step, chain_parents

#: Lengths of text, in tokens, that a step of one node is measured at.
CONTEXTS = (256, 1024, 4096, 8192)
#: Tokens per prefill step.
CHUNK = 256

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Medians for a step of ``nodes``. ``simple_*`` are without :mod:`aparte.model.fuse`."""

    nodes: int
    middle_ms: float
    device_ms: float
    simple_middle_ms: float
    simple_device_ms: float
    transformers_ms: float

    @property
    def step_ms(self) -> float:
        """Both sides, one after the other."""
        return self.middle_ms + self.device_ms


@dataclass(frozen=True)
class ContextRow:
    """Medians for a step of one node that sees ``context`` tokens, itself included."""

    context: int
    middle_ms: float
    device_ms: float

    @property
    def step_ms(self) -> float:
        """Both sides, one after the other."""
        return self.middle_ms + self.device_ms


@dataclass(frozen=True)
class Report:
    """What ``bench step --json`` prints, without the settings."""

    rows: list[Row]
    contexts: list[ContextRow]

    def to_dict(self) -> dict[str, Any]:
        """With the ratios that follow from the rows."""
        by_nodes = {row.nodes: row.step_ms for row in self.rows}
        middle = {row.context: row.middle_ms for row in self.contexts}
        shortest = min((row.context for row in self.contexts), default=0)
        return {
            "rows": [_rounded(row) for row in self.rows],
            "ratio_vs_transformers": {
                str(row.nodes): round(row.transformers_ms / row.step_ms, 2) for row in self.rows
            },
            "window_8_over_1": round(by_nodes[8] / by_nodes[1], 2) if {1, 8} <= set(by_nodes) else None,
            "contexts": [
                _rounded(row) | {"over_shortest": round(row.step_ms / first.step_ms, 2)}
                for first in self.contexts
                if first.context == shortest
                for row in self.contexts
            ],
            "context_4096_over_256": (
                round(middle[4096] / middle[256], 2) if {256, 4096} <= set(middle) else None
            ),
        }


def _rounded(row: Row | ContextRow) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(row).items()}


def tree(nodes: int, tip: int) -> tuple[int, ...]:
    """Parents of a binary tree of ``nodes`` below slot ``tip``."""
    return tuple(tip if node == 0 else tip + 1 + (node - 1) // 2 for node in range(nodes))


class Side:
    """The parts of a model."""

    def __init__(self, blueprint: Blueprint, cut: Cut, progress: Progress | None) -> None:
        middle = cut.middle(blueprint.layers)
        self.width = blueprint.hidden_size
        self.embed, self.head = blueprint.ends()
        self.front = blueprint.stage(range(middle.start), progress, "front layers")
        self.middle = blueprint.stage(middle, progress, "middle layers")
        self.back = blueprint.stage(range(middle.stop, blueprint.layers), progress, "back layers")


class Text:
    """``context`` tokens in the caches of a model's parts, and steps after them, which change nothing."""

    def __init__(self, side: Side, context: int) -> None:
        self._side = side
        self._caches = {
            stage: prefilled(stage, context, side.width) for stage in (side.front, side.middle, side.back)
        }

    def run_middle(self, step: Step, tokens: torch.Tensor) -> object:
        return self._run(self._side.middle, step, self._side.embed(tokens))

    def run_device(self, step: Step, tokens: torch.Tensor) -> object:
        front = self._run(self._side.front, step, self._side.embed(tokens))
        return self._side.head(self._run(self._side.back, step, front))

    def _run(self, stage: Stage, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        return stage.forward(self._caches[stage], step, hidden)


def prefilled(stage: Stage, context: int, width: int) -> SlotCache:
    """A cache with ``context`` tokens, of made-up hidden states ``[n, width]``."""
    cache = stage.new_cache()
    generator = torch.Generator().manual_seed(0)
    for start in range(0, context, CHUNK):
        count = min(CHUNK, context - start)
        step = Step(start, 0, start - 1, start, chain_parents(start - 1, start, count))
        stage.forward(cache, step, torch.randn(count, width, generator=generator) * 0.02)
    return cache


class Stock:
    """The unsplit model as ``transformers`` runs it, float32, with its own cache."""

    def __init__(self, blueprint: Blueprint, context: int) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            blueprint.checkpoint.folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        ).to(blueprint.precision.device)
        self._model.eval()
        self._cache: Any = DynamicCache(config=self._model.config)
        for start in range(0, context, CHUNK):
            self._forward(torch.arange(start, min(start + CHUNK, context)) % blueprint.vocab_size)

    def run(self, tokens: torch.Tensor) -> object:
        """A chain of ``tokens`` ``[n]`` after the context, which stays as it was."""
        logits = self._forward(tokens)
        self._cache.crop(-len(tokens))
        return logits

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        device = self._model.device
        logits: torch.Tensor = self._model(tokens[None].to(device), cache=self._cache, use_cache=True).logits
        return logits


def measure(
    fast: Blueprint,
    simple: Blueprint,
    cut: Cut,
    *,
    nodes: Sequence[int],
    context: int,
    contexts: Sequence[int],
    repeats: int,
    progress: Progress | None = None,
) -> Report:
    """``fast`` and ``simple`` are the same model, the latter not fused."""
    device = fast.precision.device
    sides = [Side(blueprint, cut, progress) for blueprint in (fast, simple)]
    texts = [Text(side, context) for side in sides]
    stock = Stock(fast, context)
    runs: dict[tuple[int, str], Run] = {}
    for count in nodes:
        step = Step(0, 0, context - 1, context, tree(count, context - 1))
        tokens = torch.arange(count) % fast.vocab_size
        for prefix, text in zip(("", "simple_"), texts, strict=True):
            runs[count, f"{prefix}middle_ms"] = _bind(text.run_middle, step, tokens)
            runs[count, f"{prefix}device_ms"] = _bind(text.run_device, step, tokens)
        runs[count, "transformers_ms"] = _bind(stock.run, tokens)
    medians = in_turns(runs, repeats, device, progress)
    rows = [
        Row(count, **{name: value for (of, name), value in medians.items() if of == count}) for count in nodes
    ]
    return Report(rows, by_context(sides[0], contexts, repeats, device, progress))


def by_context(
    side: Side,
    contexts: Sequence[int],
    repeats: int,
    device: torch.device,
    progress: Progress | None = None,
) -> list[ContextRow]:
    """What one node costs that sees so many tokens, itself included."""
    runs: dict[tuple[int, str], Run] = {}
    for done, context in enumerate(contexts):
        if progress:
            progress("texts", done, len(contexts))
        last = context - 2
        text = Text(side, context - 1)
        step = Step(0, 0, last, last + 1, (last,))
        tokens = torch.zeros(1, dtype=torch.int64)
        runs[context, "middle_ms"] = _bind(text.run_middle, step, tokens)
        runs[context, "device_ms"] = _bind(text.run_device, step, tokens)
    medians = in_turns(runs, repeats, device, progress)
    return [
        ContextRow(context, medians[context, "middle_ms"], medians[context, "device_ms"])
        for context in contexts
    ]


def in_turns(
    runs: dict[tuple[int, str], Run], repeats: int, device: torch.device, progress: Progress | None = None
) -> dict[tuple[int, str], float]:
    """Median of each run, ms: all of them once, then all of them again."""
    times: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
    for turn in range(repeats + 1):
        if progress:
            progress("repeats", turn, repeats + 1)
        for key, run in runs.items():
            _wait(device)
            started = time.perf_counter()
            run()
            _wait(device)
            if turn:  # the first one allocates
                times[key].append((time.perf_counter() - started) * 1e3)
    if progress:
        progress("repeats", repeats + 1, repeats + 1)
    return {key: statistics.median(values) for key, values in times.items()}


def _bind(function: Callable[..., object], *arguments: object) -> Run:
    return lambda: function(*arguments)


def _wait(device: torch.device) -> None:
    """Until the accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
