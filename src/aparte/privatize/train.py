"""Training private ends: keep the text's distribution, lead those who have the public weights astray.

The loss is the divergence from the undefended model on conversations that it wrote itself
(:mod:`aparte.bridge.corpus`), under masks drawn anew for every batch. Two further terms push away from what
public weights would make of what crosses the wire: upwards, how far an inverter that was fitted to public
states prefers the right token to all others; downwards, the chance that the public back gives to the token
that the model prefers. Everything needed to go on after an interruption, to the bit, is in the checkpoint.
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
from aparte.bridge.train import Conversations, schedule
from aparte.privacy.inverter import Inverter
from aparte.privatize.ends import Veil
from aparte.privatize.file import write_secret
from aparte.privatize.net import EndsNet, run
from aparte.privatize.shaping import OUTSIZED

#: Conversations whose states inverters are fitted to.
FITTED_ROWS = 32
#: Tokens that the public inverter chooses among while training, besides the batch's.
OTHERS = 512
#: A lead, or a log-probability below zero, that is as good as none, in nats.
ENOUGH = 4.0


@dataclass(frozen=True)
class Recipe:
    """How private ends are trained; ``steps`` are batches of ``rows`` conversations.

    ``strength`` weighs what public weights make of the wire against the text's divergence. ``mask`` is the
    mask's expected price before training, in nats of divergence per token. ``rank`` 0 is a full change.
    """

    strength: float = 0.02
    mask: float = 0.002
    rank: int = 16
    steps: int = 400
    rows: int = 2
    learning_rate: float = 2e-3
    warmup: int = 5
    #: Most frequent tokens, over which the divergence is taken while training.
    vocabulary: int = 8192
    held_out_rows: int = 8
    #: Conversations on which it is measured what the middle reads.
    measured_rows: int = 24
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate at this step."""
        return self.learning_rate * schedule(step, self.warmup, self.steps)


@dataclass(frozen=True)
class Report:
    """What is printed as training goes on, on held-out conversations.

    ``divergence`` is in nats per token from the undefended model, ``agreement`` of first choices, and
    ``perplexity_ratio`` of the text under both. ``recovered_public`` and ``recovered_pairs`` are shares of
    tokens that a closed-form inverter finds in what goes up, fitted to public states and to pairs leaked from
    these ends; ``completed`` is the share of the model's first choices that the public back finds in what
    comes down. The audit's attacks are stronger.
    """

    step: int
    steps: int
    loss: float | None
    divergence: float
    agreement: float
    perplexity_ratio: float
    recovered_public: float
    recovered_pairs: float
    completed: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """One line for people."""
        loss = "" if self.loss is None else f" loss {self.loss:.3f};"
        return (
            f"step {self.step}/{self.steps}:{loss} held out: divergence "
            f"{self.divergence:.4f}, perplexity x {self.perplexity_ratio:.4f}, "
            f"same choices {self.agreement:.1%}; "
            f"found by a simple inverter {self.recovered_public:.1%} with public weights, "
            f"{self.recovered_pairs:.1%} with leaked pairs, by the public back {self.completed:.1%} "
            f"({self.seconds:.0f} s)"
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
        veil: Veil,
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
        self._veil = veil.to(device)
        vocabulary = teacher.head.shape[0]
        size = min(recipe.vocabulary, vocabulary)
        self._tokens = data.answered(vocabulary).topk(size).indices.sort().values.to(device)
        self._head = teacher.head[self._tokens]
        every = torch.arange(vocabulary, device=device)
        self._embeddings = teacher.embed(every).float().cpu()  # [V, D]
        known = data.batch(range(min(FITTED_ROWS, len(data))))
        self._known = known.tokens.long()
        self._public = self._fitted(known.front.float())
        self._optimizer = torch.optim.AdamW(
            list(net.trained().values()), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._step = 0

    def run(self, report: Callable[[Report], None], every: int = 25) -> None:
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
        """The conversations of this step: all of them once, in some order, before any comes again."""
        rows = min(self._recipe.rows, len(self._data))
        epoch, index = divmod(self._step, len(self._data) // rows)
        order = torch.randperm(
            len(self._data),
            generator=torch.Generator().manual_seed(seed_from(self._secret, f"order {epoch}")),
        )
        return order[index * rows : (index + 1) * rows].tolist()

    def _train(self, batch: Shard) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate(self._step)
        with torch.enable_grad():
            loss = self.loss(batch, self._values(batch.tokens, self._step))
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.trained().values(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def loss(self, batch: Shard, values: torch.Tensor) -> torch.Tensor:
        """Divergence in nats per token, and what public weights still make of the wire."""
        teacher, tokens = self._teacher, batch.tokens.long().to(self._teacher.device)
        passed = self.net(tokens, self._veil, values)
        with torch.no_grad():
            true = (batch.final.to(teacher.device, teacher.dtype) @ self._head.T).float().log_softmax(-1)
        mine = (passed.final @ self._head.T).float().log_softmax(-1)
        divergence = nn.functional.kl_div(
            mine.flatten(0, 1), true.flatten(0, 1), reduction="batchmean", log_target=True
        )
        if not self._recipe.strength:
            return divergence
        seen = (self._public_final(passed.down) @ self._head.T).float().log_softmax(-1)
        named = seen.gather(-1, true.argmax(-1, keepdim=True))
        away = torch.relu(named + ENOUGH).mean() / ENOUGH
        return divergence + self._recipe.strength * (away + self._lead(passed.sent, tokens))

    def _lead(self, sent: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """How far the public inverter prefers the right token to the next best one, in nats per dimension."""
        rows, right = sent[:, OUTSIZED:].flatten(0, 1), tokens[:, OUTSIZED:].flatten()
        candidates = torch.unique(torch.cat([right, self._tokens[:OTHERS]]))
        scores = self._public.scores(rows.cpu(), candidates.cpu()).to(rows.device)
        place = torch.searchsorted(candidates, right)[:, None]
        best = scores.scatter(1, place, -torch.inf).amax(1, keepdim=True)
        return torch.relu(scores.gather(1, place) - best + ENOUGH).mean() / rows.shape[1]

    def _values(self, tokens: torch.Tensor, draw: int) -> torch.Tensor:
        """Decoys' coordinates ``[B, T, n]`` that no text decides: what holds for any draw holds for the
        secret one."""
        generator = torch.Generator().manual_seed(seed_from(self._secret, f"decoys {draw}"))
        uniform = torch.rand(tokens.shape, generator=generator)
        normal = torch.randn(*tokens.shape, self._veil.size, generator=generator)
        return self._veil.values(uniform.to(self._teacher.device), normal.to(self._teacher.device))

    @torch.no_grad()
    def measure(self, loss: float | None, seconds: float) -> Report:
        """Where the training stands."""
        teacher, held = self._teacher, self._data.held_out
        tokens = held.tokens.long().to(teacher.device)
        passed = self.net(tokens, self._veil, self._values(held.tokens, -1))
        seen = self._public_final(passed.down)
        total, same, extra, completed, count = 0.0, 0, 0.0, 0, 0
        for row, true in enumerate(held.final.to(teacher.device, teacher.dtype)):
            ours, theirs, public = (
                (states @ teacher.head.T).float().log_softmax(-1)
                for states in (passed.final[row], true, seen[row])
            )
            best = theirs.argmax(-1)
            total += float((theirs.exp() * (theirs - ours)).sum())
            same += int((ours.argmax(-1) == best).sum())
            completed += int((public.argmax(-1) == best).sum())
            following = tokens[row, 1:, None]
            extra += float((theirs[:-1].gather(1, following) - ours[:-1].gather(1, following)).sum())
            count += len(ours)
        leaked = self.net.sent(
            self._known.to(teacher.device), self._veil, self._values(self._known, -2)
        ).cpu()
        public, pairs = (
            _found(inverter, passed.sent.cpu(), held.tokens.long())
            for inverter in (self._public, self._fitted(leaked))
        )
        return Report(
            self._step,
            self._recipe.steps,
            loss,
            total / count,
            same / count,
            math.exp(min(50.0, extra / (count - len(tokens)))),
            public,
            pairs,
            completed / count,
            seconds,
        )

    def _public_final(self, down: torch.Tensor) -> torch.Tensor:
        """What the public back makes of what comes down, ``[B, T, D]`` to the head's input."""
        teacher = self._teacher
        back = range(teacher.middle.stop, len(teacher.layers))
        result: torch.Tensor = teacher.norm(run(teacher, teacher.layers, back, down.to(teacher.dtype)))
        return result

    def _fitted(self, states: torch.Tensor) -> Inverter:
        """An inverter from pairs of the known conversations and states ``[B, T, D]`` for them."""
        return Inverter(
            states[:, OUTSIZED:].flatten(0, 1), self._known[:, OUTSIZED:].flatten(), self._embeddings
        )

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


def _found(inverter: Inverter, sent: torch.Tensor, tokens: torch.Tensor) -> float:
    """The share of ``tokens`` ``[B, T]`` that ``inverter`` finds in states ``[B, T, D]``."""
    right = [
        inverter.scores(row[OUTSIZED:]).argmax(1) == true[OUTSIZED:]
        for row, true in zip(sent, tokens, strict=True)
    ]
    return float(torch.cat(right).float().mean())
