"""The mask's shape: as much of it as possible where the middle does not look, and as little where it does.

Two matrices decide. The *sensitivity* ``F`` ``[D, D]`` is the Fisher information of the text's distribution
about a disturbance of one node's state that is taken out again behind the middle: a mask with covariance ``S``
costs about ``tr(F S) / 2`` nats of divergence per token. The *covariance* ``C`` ``[D, D]`` of the states bounds
what the masked state can tell: ``log det(I + C S^-1) / 2`` nats, the capacity of a Gaussian channel. To have the
least of the second at a given price in the first, both are made diagonal by one change of coordinates, in
which each direction gets its own answer in closed form (water-filling, seen from the defender's side).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from aparte.bridge.corpus import Shard
from aparte.bridge.teacher import Teacher
from aparte.model.parts import Progress
from aparte.privatize.net import run

#: The first positions, whose states are outsized, are left out of all averages.
OUTSIZED = 4
#: Share of the average variance that is added to the covariance, for the sake of directions without any.
FLOOR = 1e-5


class MaskShape(NamedTuple):
    """``matrix`` ``[D, D]`` times standard normal numbers is a mask; ``bits`` is what a masked state can tell
    at most, and ``nats`` what the mask is expected to cost per token before any training. ``rate`` is the
    price at which one more nat would be hidden."""

    matrix: torch.Tensor
    bits: float
    nats: float
    rate: float


def sensitivity(teacher: Teacher, batches: Iterable[Shard], seed: int, progress: Progress) -> torch.Tensor:
    """``F`` ``[D, D]`` from gradients of the likelihood of text drawn from the model itself."""
    generator = torch.Generator().manual_seed(seed)
    width = teacher.config.hidden_size
    total, count = torch.zeros(width, width), 0
    back = range(teacher.middle.stop, len(teacher.layers))
    batches = list(batches)
    for number, batch in enumerate(batches):
        progress("measuring what the middle reads", number, len(batches))
        front = batch.front.to(teacher.device).to(teacher.dtype)
        mask = torch.zeros_like(front, requires_grad=True)
        with torch.enable_grad():
            middle = run(teacher, teacher.layers, teacher.middle, front + mask)
            final = teacher.norm(run(teacher, teacher.layers, back, middle - mask))
            logits = (final @ teacher.head.T).float().flatten(0, 1)  # [B T, V]
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            loss = nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
            (gradient,) = torch.autograd.grad(loss, mask)
        rows = gradient[:, OUTSIZED:].reshape(-1, width).float().cpu()
        total += rows.T @ rows
        count += len(rows)
    progress("measuring what the middle reads", len(batches), len(batches))
    return total / count


def covariance(states: torch.Tensor) -> torch.Tensor:
    """``C`` ``[D, D]`` of states ``[B, T, D]``."""
    rows = states[:, OUTSIZED:].reshape(-1, states.shape[2]).float()
    centred = rows - rows.mean(0)
    result = centred.T @ centred / len(rows)
    result.diagonal().add_(FLOOR * result.diagonal().mean())
    return result


def shape_mask(sensitivity: torch.Tensor, covariance: torch.Tensor, budget: float) -> MaskShape:
    """The mask that tells least at an expected price of ``budget`` nats per token; none at all for 0."""
    width = len(covariance)
    if budget <= 0:
        return MaskShape(torch.zeros(width, width), math.inf, 0.0, 0.0)
    root = torch.linalg.cholesky(covariance.double())
    inner = root.T @ sensitivity.double() @ root
    gains, axes = torch.linalg.eigh((inner + inner.T) / 2)
    gains = gains.clamp_min(1e-9 * float(gains[-1]) + 1e-300)
    variances, level = water_fill(gains, budget)
    matrix = root @ axes * variances.sqrt()
    bits = 0.5 * float(torch.log1p(1 / variances).sum()) / math.log(2)
    return MaskShape(matrix.float(), bits, 0.5 * float((gains * variances).sum()), 1 / level)


def water_fill(gains: torch.Tensor, budget: float) -> tuple[torch.Tensor, float]:
    """Variances ``[D]`` that minimise ``sum log(1 + 1 / s) / 2`` under ``sum gains * s / 2 = budget``.

    There ``1 / (s (1 + s)) = level * gain`` in all directions; the ``level`` is the second result.
    """
    low, high = -200.0, 200.0
    for _ in range(200):
        level = math.exp((low + high) / 2)
        if float((gains * _variances(gains, level)).sum()) / 2 > budget:
            low = math.log(level)
        else:
            high = math.log(level)
    level = math.exp(high)
    return _variances(gains, level), level


def _variances(gains: torch.Tensor, level: float) -> torch.Tensor:
    weighed = level * gains
    # This is (-1 + sqrt(1 + 4 / w)) / 2, without the difference of two nearly equal numbers.
    result: torch.Tensor = 2 / (weighed * (1 + (1 + 4 / weighed).sqrt()))
    return result
