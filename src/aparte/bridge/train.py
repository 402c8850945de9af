"""Training a bridge on the states that the model left while it wrote (:mod:`aparte.bridge.corpus`).

The bridge learns the target's distribution over a *draft vocabulary*, the tokens that the model writes
most, and the middle's output itself; deeper unrolls come in as training goes on, so that it learns to
feed on its own guesses. Everything needed to go on after an interruption is in the checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from aparte.bridge.corpus import Shard
from aparte.bridge.net import BridgeNet, standardise
from aparte.bridge.teacher import Teacher
from aparte.bridge.unroll import unroll
from aparte.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """How a bridge is trained. ``steps`` are batches of ``rows`` conversations."""

    steps: int = 1300
    rows: int = 4
    learning_rate: float = 1e-3
    warmup: int = 40
    draft_vocabulary: int = 8192
    #: Share of the training after which unroll 2, 3, ... join in.
    unroll_from: tuple[float, ...] = (0.3, 0.7)
    #: Weight of each further unroll, and of matching the states beside matching the distribution.
    unroll_decay: float = 0.8
    state_weight: float = 0.2
    held_out_rows: int = 8
    seed: int = 0

    @classmethod
    def of(cls, steps: int, seed: int, *, with_texts: bool, further: bool) -> Recipe:
        """``with_texts`` conversations are twice as long, and a batch has half as many; what goes on
        ``further`` from a bridge begins with more careful steps and deeper unrolls."""
        recipe = cls(steps, rows=2 if with_texts else 4, seed=seed)
        return replace(recipe, learning_rate=5e-4, unroll_from=(0.0, 0.6)) if further else recipe

    def depth(self, step: int) -> int:
        """Unrolls at this step."""
        return 1 + sum(step >= share * self.steps for share in self.unroll_from)

    def rate(self, step: int) -> float:
        """Learning rate at this step."""
        return self.learning_rate * schedule(step, self.warmup, self.steps)


def schedule(step: int, warmup: int, steps: int) -> float:
    """Share of the learning rate: a short warm-up, then half a cosine to nothing."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * done))


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """What lies in ``folder`` is of a run with these settings from now on. Raises :class:`UserError` if it
    is of another one."""
    file = folder / "settings.json"
    wanted = json.dumps(settings, indent=1)
    if not file.exists():
        file.write_text(wanted, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != wanted:
        raise UserError(
            f"{folder} holds a run with other settings. Go on with its options, give another --work, or "
            "delete that folder."
        )


@dataclass(frozen=True)
class Report:
    """What is printed as training goes on; ``top1`` by depth and ``mat`` are from held-out conversations.

    ``mat`` is that of a greedily drafted chain of ``len(top1)`` tokens.
    """

    step: int
    steps: int
    loss: float
    top1: tuple[float, ...]
    mat: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """One line for people."""
        top1 = " ".join(f"{share:.1%}" for share in self.top1)
        return (
            f"step {self.step}/{self.steps}: loss {self.loss:.3f}, held out: first choice right {top1} "
            f"by depth, MAT of a chain {self.mat:.2f} ({self.seconds:.0f} s)"
        )


class Conversations:
    """All shards' rows, the last ones of the last shard held out."""

    def __init__(self, paths: Sequence[Path], held_out: int) -> None:
        shards = [Shard.load(path) for path in paths]
        self._rows = [(shard, row) for shard in shards for row in range(len(shard.tokens))]
        self.held_out = self.batch(range(len(self._rows) - held_out, len(self._rows)))
        del self._rows[len(self._rows) - held_out :]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Sequence[int]) -> Shard:
        """These conversations side by side."""
        chosen = [self._rows[row] for row in rows]
        return Shard(
            *(
                torch.stack([getattr(shard, name)[row] for shard, row in chosen])
                for name in Shard.__dataclass_fields__
            )
        )

    def answered(self, vocabulary: int) -> torch.Tensor:
        """How often each token stands in an answer, ``[V]``."""
        counts = torch.zeros(vocabulary, dtype=torch.int64)
        for shard in {id(shard): shard for shard, _ in self._rows}.values():
            counts += torch.bincount(shard.tokens[shard.answer].long(), minlength=vocabulary)
        return counts

    def statistics(self) -> dict[str, torch.Tensor]:
        """Mean and standard deviation of the states by dimension, without the first, outsized positions."""
        result = {}
        shard = self._rows[0][0]
        for name in ("front", "middle"):
            states = getattr(shard, name)[:, 16:].reshape(-1, getattr(shard, name).shape[2])[::7].float()
            result[f"{name}_mean"] = states.mean(dim=0)
            result[f"{name}_std"] = states.std(dim=0).clamp(min=1e-3)
        return result


class Trainer:
    """One training run, in ``folder``, where it finds its own checkpoint after an interruption."""

    def __init__(
        self,
        teacher: Teacher,
        net: BridgeNet,
        data: Conversations,
        recipe: Recipe,
        folder: Path,
        draft_ids: torch.Tensor | None = None,
    ) -> None:
        """``draft_ids`` are those of the bridge that training goes on from, if it does."""
        self.net = net
        self._teacher = teacher
        self._data = data
        self._recipe = recipe
        self._checkpoint = folder / "training.safetensors"
        vocabulary = teacher.head.shape[0]
        if draft_ids is None:
            size = min(recipe.draft_vocabulary, vocabulary)
            draft_ids = data.answered(vocabulary).topk(size).indices.sort().values
        #: Draft vocabulary, the most frequent tokens of the answers, in increasing order.
        self.draft_ids = draft_ids
        self._head = teacher.head[self.draft_ids.to(teacher.device)]
        self._optimizer = torch.optim.AdamW(
            net.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._step = 0

    def run(self, report: Callable[[Report], None], every: int = 50) -> None:
        """Train to the end; ``report`` is called every so many steps, after saving a checkpoint."""
        self._resume()
        started, losses = time.perf_counter(), list[float]()
        generator = torch.Generator()
        while self._step < self._recipe.steps:
            per_epoch = len(self._data) // self._recipe.rows
            epoch, index = divmod(self._step, per_epoch)
            order = torch.randperm(
                len(self._data), generator=generator.manual_seed(self._recipe.seed + epoch)
            )
            rows = order[index * self._recipe.rows : (index + 1) * self._recipe.rows].tolist()
            losses.append(self._train(self._data.batch(rows)))
            self._step += 1
            if self._step % every == 0 or self._step == self._recipe.steps:
                self.save()
                top1, mat = self.evaluate()
                loss, seconds = sum(losses) / len(losses), time.perf_counter() - started
                report(Report(self._step, self._recipe.steps, loss, top1, mat, seconds))
                losses = []

    def _train(self, batch: Shard) -> float:
        rate = self._recipe.rate(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with torch.enable_grad():
            loss = self.loss(batch, self._recipe.depth(self._step))
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def loss(self, batch: Shard, depth: int) -> torch.Tensor:
        """Cross-entropy with the target's distribution where answers are written, and distance of states."""
        device = self._teacher.device
        front, middle = batch.front.to(device), batch.middle.to(device)
        wanted = torch.zeros_like(batch.answer)
        wanted[:, :-1] = batch.answer[:, 1:]
        wanted[:, :depth] = False
        wanted = wanted.to(device)
        with torch.no_grad():
            true = (batch.final.to(device)[wanted].to(self._teacher.dtype) @ self._head.T).softmax(
                dim=-1, dtype=torch.float32
            )
        goal = standardise(middle.float(), self.net.middle_mean, self.net.middle_std)
        total, weights = torch.zeros((), device=device), 0.0
        with torch.autocast(device.type, self._teacher.dtype, enabled=self._teacher.dtype != torch.float32):
            for guess in unroll(self.net, self._teacher, front, middle, depth):
                logits = guess.final[wanted] @ self._head.T
                entropy = nn.functional.cross_entropy(logits.float(), true)
                near = standardise(guess.middle.float(), self.net.middle_mean, self.net.middle_std)
                distance = nn.functional.smooth_l1_loss(near[wanted], goal[wanted])
                weight = self._recipe.unroll_decay ** (guess.depth - 1)
                total = total + weight * (entropy + self._recipe.state_weight * distance)
                weights += weight
        return total / weights

    @torch.no_grad()
    def evaluate(self, depth: int = 5) -> tuple[tuple[float, ...], float]:
        """Agreement with the target's first choice by depth, and MAT of a drafted chain, held out."""
        batch, device = self._data.held_out, self._teacher.device
        top = self._top(batch.final.to(device).to(self._teacher.dtype), self._teacher.head)
        counted = torch.zeros_like(batch.answer, device=device)
        counted[:, depth : -depth - 1] = batch.answer[:, depth + 1 : -depth].to(device)
        alive, shares, mat = counted.clone(), [], 1.0
        front, middle = batch.front.to(device), batch.middle.to(device)
        with torch.autocast(device.type, self._teacher.dtype, enabled=self._teacher.dtype != torch.float32):
            for guess in unroll(self.net, self._teacher, front, middle, depth):
                ids = self.draft_ids.to(device)[self._top(guess.final.to(self._teacher.dtype), self._head)]
                right = ids == top
                # A chain that began at t has its token of this depth checked at t + depth - 1.
                right = torch.roll(right, 1 - guess.depth, dims=1)
                shares.append(float(right[counted].float().mean()))
                alive &= right
                mat += float(alive[counted].float().mean())
        return tuple(shares), mat

    @staticmethod
    def _top(final: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """First choice at each position, ``[B, T]``, one conversation at a time for memory's sake."""
        return torch.stack([(row @ weight.T).argmax(dim=-1) for row in final])

    def save(self) -> None:
        """Network, optimizer and step; written beside first, so that a checkpoint is always whole."""
        tensors = {f"net.{name}": value.contiguous() for name, value in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value.contiguous()
        partial = self._checkpoint.with_suffix(".partial")
        save_file(tensors, partial, {"step": str(self._step), "recipe": json.dumps(asdict(self._recipe))})
        partial.replace(self._checkpoint)

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        with safe_open(self._checkpoint, framework="pt") as file:
            metadata = file.metadata()
            if metadata["recipe"] != json.dumps(asdict(self._recipe)):
                return  # another recipe: begin anew
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.net.load_state_dict(
            {name[4:]: value for name, value in tensors.items() if name.startswith("net.")}
        )
        for name, parameter in self.net.named_parameters():
            self._optimizer.state[parameter] = {
                key: tensors[f"optimizer.{key}.{name}"].to(parameter.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"optimizer.{key}.{name}" in tensors
            }
        self._step = int(metadata["step"])
