"""What a step costs by its number of nodes: middle, device, and the unsplit model of ``transformers``.

Everything is measured in one process, in turns, and reported as medians, so that a machine that is busy
for a while slows all columns alike. No network, no wire format, no drafter: the forward passes alone.
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

#: The contexts that ``context_4096_over_256`` compares, in tokens.
SHORT, LONG = 256, 4096
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
class Report:
    """What ``bench step --json`` prints, without the settings."""

    rows: list[Row]
    #: Of one node in the middle; None if the model's context is too short.
    context_4096_over_256: float | None

    def to_dict(self) -> dict[str, Any]:
        """With the ratios that follow from the rows."""
        by_nodes = {row.nodes: row.step_ms for row in self.rows}
        return {
            "rows": [{name: round(value, 3) for name, value in asdict(row).items()} for row in self.rows],
            "ratio_vs_transformers": {
                str(row.nodes): round(row.transformers_ms / row.step_ms, 2) for row in self.rows
            },
            "window_8_over_1": round(by_nodes[8] / by_nodes[1], 2) if {1, 8} <= set(by_nodes) else None,
            "context_4096_over_256": self.context_4096_over_256,
        }


def tree(nodes: int, tip: int) -> tuple[int, ...]:
    """Parents of a binary tree of ``nodes`` below slot ``tip``."""
    return tuple(tip if node == 0 else tip + 1 + (node - 1) // 2 for node in range(nodes))


class Side:
    """The parts of a model, each with a cache that holds ``context`` tokens."""

    def __init__(self, blueprint: Blueprint, cut: Cut, context: int, progress: Progress | None) -> None:
        middle = cut.middle(blueprint.layers)
        self._embed, self._head = blueprint.ends()
        self._front = blueprint.stage(range(middle.start), progress, "front layers")
        self.middle = blueprint.stage(middle, progress, "middle layers")
        self._back = blueprint.stage(range(middle.stop, blueprint.layers), progress, "back layers")
        self._caches = {
            stage: prefilled(stage, context, blueprint.hidden_size)
            for stage in (self._front, self.middle, self._back)
        }

    def run_middle(self, step: Step, tokens: torch.Tensor) -> object:
        return self.middle.forward(self._caches[self.middle], step, self._embed(tokens))

    def run_device(self, step: Step, tokens: torch.Tensor) -> object:
        front = self._front.forward(self._caches[self._front], step, self._embed(tokens))
        return self._head(self._back.forward(self._caches[self._back], step, front))


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
    repeats: int,
    progress: Progress | None = None,
) -> Report:
    """``fast`` and ``simple`` are the same model, the latter not fused."""
    device = fast.precision.device
    sides = [Side(blueprint, cut, context, progress) for blueprint in (fast, simple)]
    stock = Stock(fast, context)
    runs: dict[tuple[int, str], Run] = {}
    for count in nodes:
        step = Step(0, 0, context - 1, context, tree(count, context - 1))
        tokens = torch.arange(count) % fast.vocab_size
        for prefix, side in zip(("", "simple_"), sides, strict=True):
            runs[count, f"{prefix}middle_ms"] = _bind(side.run_middle, step, tokens)
            runs[count, f"{prefix}device_ms"] = _bind(side.run_device, step, tokens)
        runs[count, "transformers_ms"] = _bind(stock.run, tokens)
    medians = in_turns(runs, repeats, device, progress)
    rows = [
        Row(count, **{name: value for (of, name), value in medians.items() if of == count}) for count in nodes
    ]
    growth = None
    if fast.max_context > LONG:
        growth = _context_growth(sides[0].middle, fast.hidden_size, repeats, device)
    return Report(rows, growth)


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


def _context_growth(stage: Stage, width: int, repeats: int, device: torch.device) -> float:
    runs: dict[tuple[int, str], Run] = {}
    for context in (SHORT, LONG):
        step = Step(0, 0, context - 1, context, (context - 1,))
        runs[context, ""] = _bind(
            stage.forward, prefilled(stage, context, width), step, torch.zeros(1, width)
        )
    medians = in_turns(runs, repeats, device)
    return round(medians[LONG, ""] / medians[SHORT, ""], 2)


def _bind(function: Callable[..., object], *arguments: object) -> Run:
    return lambda: function(*arguments)


def _wait(device: torch.device) -> None:
    """Until the accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
