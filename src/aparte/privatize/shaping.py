"""The mask's shape: what the middle hardly reads of a state is replaced by what a decoy would have there.

Two matrices decide. The *sensitivity* ``F`` ``[D, D]`` is the Fisher information of the text's distribution
about a disturbance of one node's state that is taken out again behind the middle: one with covariance ``S``
costs about ``tr(F S) / 2`` nats of divergence per token. The *covariance* ``C`` ``[D, D]`` is that of the
states. One change of coordinates makes the first diagonal and the second the identity; there, to give a
coordinate the value that another token's state has costs its sensitivity, as the difference of two states
has twice their covariance. The least read coordinates are given away, as many as the price allows.

What a decoy has there is a linear function of its embedding, fitted to the states, plus what context adds,
as a random number of the same covariance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from aparte.bridge.corpus import Shard
from aparte.bridge.teacher import Teacher
from aparte.model.parts import Progress
from aparte.privatize.ends import Veil
from aparte.privatize.net import run

#: The first positions, whose states are outsized, are left out of all averages.
OUTSIZED = 4
#: Share of the average variance that is added to a covariance, for the sake of directions without any.
FLOOR = 1e-5
#: Most frequent tokens, which serve as decoys as often as they occur.
DECOYS = 2048


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


def weak_coordinates(
    sensitivity: torch.Tensor, covariance: torch.Tensor, price: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``left [D, n]`` and ``right [n, D]`` of the coordinates to give away for ``price`` nats per token.

    ``right`` reads them off a state around its mean, ``left`` puts them into one, and ``right @ left`` is 1.
    """
    root = torch.linalg.cholesky(covariance.double())
    inner = root.T @ sensitivity.double() @ root
    gains, axes = torch.linalg.eigh((inner + inner.T) / 2)  # increasing
    count = int((gains.clamp_min(0).cumsum(0) <= price).sum()) if price > 0 else 0
    chosen = axes[:, :count]
    right = torch.linalg.solve_triangular(root.T, chosen, upper=True).T
    return (root @ chosen).float(), right.float()


def shape_veil(teacher: Teacher, batches: Sequence[Shard], sensitivity: torch.Tensor, price: float) -> Veil:
    """The mask for an expected price of ``price`` nats per token; an empty one for 0."""
    states = torch.cat([batch.front for batch in batches])[:, OUTSIZED:].flatten(0, 1).float()  # [N, D]
    tokens = torch.cat([batch.tokens for batch in batches]).long()
    centre = states.mean(0)
    left, right = weak_coordinates(sensitivity, covariance(states), price)
    counts = torch.bincount(tokens.flatten(), minlength=teacher.head.shape[0]).float()
    decoys = counts.topk(min(DECOYS, int((counts > 0).sum()))).indices.sort().values
    values = (states - centre) @ right.T  # [N, n]
    inputs = _with_one(teacher, tokens[:, OUTSIZED:].flatten())
    gram = inputs.T @ inputs
    gram.diagonal()[:-1] += 1e-2 * gram.diagonal()[:-1].mean()
    weights = torch.linalg.solve(gram, inputs.T @ values)  # [D + 1, n]
    rest = values - inputs @ weights
    spread = rest.T @ rest / len(rest)
    spread.diagonal().add_(1e-6)
    return Veil(
        left,
        right,
        centre,
        table=_with_one(teacher, decoys) @ weights,
        shares=counts[decoys] / counts[decoys].sum(),
        spread=torch.linalg.cholesky(spread) if len(spread) else spread,
    )


def covariance(rows: torch.Tensor) -> torch.Tensor:
    """``C`` ``[D, D]`` of states ``[N, D]``."""
    centred = rows - rows.mean(0)
    result = centred.T @ centred / len(rows)
    result.diagonal().add_(FLOOR * result.diagonal().mean())
    return result


def _with_one(teacher: Teacher, tokens: torch.Tensor) -> torch.Tensor:
    """Embeddings of ``tokens`` and a constant, ``[N, D + 1]``."""
    rows = teacher.embed(tokens.to(teacher.device)).float().cpu()
    return torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
