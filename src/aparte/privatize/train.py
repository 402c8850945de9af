"""Training private ends: keep the text's distribution, give away less of the text.

The loss is the divergence from the undefended model on conversations that it wrote itself
(:mod:`aparte.bridge.corpus`), under masks drawn anew for every batch, plus what the front's output can tell
through the mask (``log det(I + C S^-1) / 2``, with the batch's covariance), at the price at which the mask itself
hides. Everything needed to go on after an interruption, to the bit, is in the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from aparte.bridge.corpus import Shard
from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations
from aparte.privacy.inverter import Inverter
from aparte.privatize.file import write_secret
from aparte.privatize.net import EndsNet
from aparte.privatize.shaping import OUTSIZED, MaskShape


@dataclass(frozen=True)
class Recipe:
    """How private ends are trained; ``steps`` are batches of ``rows`` conversations.

    ``strength`` is the mask's expected price before training, in nats of divergence per token. ``rank`` 0 is
    a full change.
    """

    strength: float = 0.1
    rank: int = 16
    steps: int = 200
    rows: int = 4
    learning_rate: float = 1e-3
    warmup: int = 10
    #: Most frequent tokens, over which the divergence is taken while training.
    vocabulary: int = 8192
    #: What the front may still tell, weighed at the mask's own price of hiding.
    information: float = 1.0
    held_out_rows: int = 8
    #: Conversations on which it is measured what the middle reads.
    measured_rows: int = 40
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate: a short warm-up, then half a cosine to nothing."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Report:
    """What is printed as training goes on, on held-out conversations.

    ``bits`` are what the front's output tells through the mask at most, per node; ``divergence`` is in nats per token from the undefended model, ``agreement`` of first choices, and
    ``perplexity_ratio`` of the text under both. ``recovered_public`` and ``recovered_pairs`` are shares of tokens
    that a closed-form inverter finds that was fitted to public states, and to pairs leaked from these ends;
    the audit's attacks are stronger.
    """

    step: int
    steps: int
    loss: float | None
    bits: float | None
    divergence: float
    agreement: float
    perplexity_ratio: float
    recovered_public: float
    recovered_pairs: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """One line for people."""
        loss = "" if self.loss is None else f" loss {self.loss:.3f};"
        return (
            f"step {self.step}/{self.steps}:{loss} held out: divergence "
            f"{self.divergence:.4f}, perplexity x {self.perplexity_ratio:.4f}, same choices {self.agreement:.1%}; "
            f"found by a simple inverter {self.recovered_public:.1%} with public weights, "
            f"{self.recovered_pairs:.1%} with leaked pairs ({self.seconds:.0f} s)"
        )


def seed_from(secret: bytes, what: str) -> int:
    """A seed for what is drawn while training."""
    return int.from_bytes(hashlib.blake2b(what.encode(), key=secret, digest_size=7).digest(), "little")


class Trainer:
    """One training run, in ``folder``, where it finds its own checkpoint after an interruption."""

    def __init__(
        self,
        teacher: Teacher,
        net: EndsNet,
        shape: MaskShape,
        data: Conversations,
        recipe: Recipe,
        folder: Path,
        secret: bytes,
    ) -> None:
        """``secret`` decides what is drawn, so that nobody can train the same ends."""
        self._secret = secret
        self.net = net
        self._teacher = teacher
        self._data = data
        self._recipe = recipe
        self._checkpoint = folder / "training.safetensors"
        device = teacher.device
        self._matrix = shape.matrix.to(device)
        self._masked = bool(shape.matrix.any())
        self._whiten = torch.linalg.inv(shape.matrix.double()).float().to(device) if self._masked else None
        self._price = recipe.information * shape.rate
        vocabulary = teacher.head.shape[0]
        size = min(recipe.vocabulary, vocabulary)
        self._tokens = data.answered(vocabulary).topk(size).indices.sort().values.to(device)
        self._head = teacher.head[self._tokens]
        self._optimizer = torch.optim.AdamW(
            list(net.trained().values()), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._step = 0

    def run(self, report: Callable[[Report], None], every: int = 50) -> None:
        """Train to the end. ``report`` is called at the start and every so many steps, after a checkpoint."""
        self._resume()
        started, losses = time.perf_counter(), list[float]()
        if self._step == 0:
            report(self.measure(None, 0.0))
        while self._step < self._recipe.steps:
            losses.append(self._train(self._data.batch(self._rows())))
            self._step += 1
            if self._step % every == 0 or self._step == self._recipe.steps:
                self.save()
                report(self.measure(sum(losses) / len(losses), time.perf_counter() - started))
                losses = []

    def _rows(self) -> list[int]:
        """The conversations of this step: all of them once, in an order of its own, before any comes again."""
        rows = min(self._recipe.rows, len(self._data))
        epoch, index = divmod(self._step, len(self._data) // rows)
        order = torch.randperm(
            len(self._data), generator=torch.Generator().manual_seed(seed_from(self._secret, f"order {epoch}"))
        )
        return order[index * rows : (index + 1) * rows].tolist()

    def _train(self, batch: Shard) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate(self._step)
        with torch.enable_grad():
            loss = self.loss(batch, self._mask(batch.tokens, self._step))
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.trained().values(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def loss(self, batch: Shard, mask: torch.Tensor) -> torch.Tensor:
        """Divergence in nats per token, and what can be told in nats, at its price."""
        teacher = self._teacher
        front, final = self.net(batch.tokens.long().to(teacher.device), mask)
        with torch.no_grad():
            true = (batch.final.to(teacher.device, teacher.dtype) @ self._head.T).float().log_softmax(-1)
        mine = (final @ self._head.T).float().log_softmax(-1)
        divergence = nn.functional.kl_div(mine.flatten(0, 1), true.flatten(0, 1), None, None, "batchmean", log_target=True)
        if self._whiten is None or self._price == 0:
            return divergence
        return divergence + self._price * self._told(front)

    def _told(self, front: torch.Tensor) -> torch.Tensor:
        """At most so many nats of ``front`` ``[B, T, D]`` show through the mask, per node."""
        assert self._whiten is not None
        rows = front[:, OUTSIZED:].flatten(0, 1).float() @ self._whiten.T
        centred = rows - rows.mean(0)
        covariance = centred.T @ centred / len(rows)
        covariance = covariance + torch.eye(len(covariance), device=covariance.device)
        return torch.linalg.cholesky(covariance).diagonal().log().sum()

    def _mask(self, tokens: torch.Tensor, draw: int) -> torch.Tensor:
        """Masks ``[B, T, D]`` that no text decides: what holds for any draw holds for the secret one."""
        if not self._masked:
            return torch.zeros(*tokens.shape, len(self._matrix), device=self._matrix.device)
        generator = torch.Generator().manual_seed(seed_from(self._secret, f"mask {draw}"))
        normal = torch.randn(*tokens.shape, len(self._matrix), generator=generator)
        return normal.to(self._matrix.device) @ self._matrix.T

    @torch.no_grad()
    def measure(self, loss: float | None, seconds: float) -> Report:
        """Where the training stands."""
        teacher, held = self._teacher, self._data.held_out
        tokens = held.tokens.long().to(teacher.device)
        mask = self._mask(held.tokens, -1)
        front, final = self.net(tokens, mask)
        total, same, extra, count = 0.0, 0, 0.0, 0
        for row, (mine, true) in enumerate(zip(final, held.final.to(teacher.device, teacher.dtype), strict=True)):
            ours = (mine @ teacher.head.T).float().log_softmax(-1)
            theirs = (true @ teacher.head.T).float().log_softmax(-1)
            total += float((theirs.exp() * (theirs - ours)).sum())
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            following = tokens[row, 1:, None]
            extra += float((theirs[:-1].gather(1, following) - ours[:-1].gather(1, following)).sum())
            count += len(ours)
        bits = None if self._whiten is None else float(self._told(front)) / math.log(2)
        sent = (front.float() + mask).cpu()
        return Report(
            self._step,
            self._recipe.steps,
            loss,
            bits,
            total / count,
            same / count,
            math.exp(min(50.0, extra / (count - len(tokens)))),
            *self._recovered(sent, held.tokens.long()),
            seconds,
        )

    def _recovered(self, sent: torch.Tensor, tokens: torch.Tensor) -> tuple[float, float]:
        """Shares of the held-out tokens that inverters find in what is sent: public, and from leaked pairs."""
        batch = self._data.batch(range(min(32, len(self._data))))
        known = batch.tokens.long()
        front = self.net.front(known.to(self._teacher.device)).float()
        leaked = (front + self._mask(known, -2)).cpu()
        embeddings = self._teacher.embed.weight.detach().float().cpu()  # type: ignore[union-attr]
        shares = []
        for states in (batch.front.float(), leaked):
            inverter = Inverter(
                states[:, OUTSIZED:].flatten(0, 1), known[:, OUTSIZED:].flatten(), embeddings
            )
            found = [
                inverter.scores(row[OUTSIZED:]).argmax(1) == true[OUTSIZED:]
                for row, true in zip(sent, tokens, strict=True)
            ]
            shares.append(float(torch.cat(found).float().mean()))
        return shares[0], shares[1]

    def save(self) -> None:
        """Changes, optimizer and step."""
        trained = self.net.trained()
        tensors = {f"net.{name}": value for name, value in trained.items()}
        for name, parameter in trained.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        header = {"step": str(self._step), "recipe": json.dumps(asdict(self._recipe))}
        write_secret(self._checkpoint, tensors, header)

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        with safe_open(self._checkpoint, framework="pt") as file:
            metadata = file.metadata()
            if metadata["recipe"] != json.dumps(asdict(self._recipe)):
                return  # another recipe: begin anew
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, parameter in self.net.trained().items():
            parameter.data.copy_(tensors[f"net.{name}"])
            self._optimizer.state[parameter] = {
                key: tensors[f"optimizer.{key}.{name}"].to(parameter.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"optimizer.{key}.{name}" in tensors
            }
        self._step = int(metadata["step"])
