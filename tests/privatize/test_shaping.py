"""The mask's shape: what it may cost is what it costs, and nothing tells less at that price."""

from __future__ import annotations

import math

import pytest
import torch

from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations
from aparte.privatize.net import run
from aparte.privatize.shaping import sensitivity, shape_mask, water_fill

GENERATOR = torch.Generator().manual_seed(0)


def told(gains: torch.Tensor, variances: torch.Tensor) -> tuple[float, float]:
    """Nats told, and the price."""
    return 0.5 * float(torch.log1p(1 / variances).sum()), 0.5 * float((gains * variances).sum())


@pytest.mark.parametrize("budget", [1e-4, 0.1, 50.0])
def test_water_filling_spends_its_budget_and_nothing_beats_it(budget: float) -> None:
    gains = torch.logspace(-8, 3, 40, dtype=torch.float64)
    best, level = water_fill(gains, budget)
    least, price = told(gains, best)
    assert price == pytest.approx(budget, rel=1e-6)
    for _ in range(200):
        other = best * torch.exp(0.3 * torch.randn(40, generator=GENERATOR, dtype=torch.float64))
        other *= budget / told(gains, other)[1]
        assert told(gains, other)[0] >= least - 1e-9
    more = water_fill(gains, 1.001 * budget)[0]
    assert (least - told(gains, more)[0]) / (0.001 * budget) == pytest.approx(level, rel=0.01)


def test_a_mask_costs_what_was_asked_by_the_matrices_that_it_was_made_from() -> None:
    inner = torch.randn(12, 12, generator=GENERATOR)
    states = torch.randn(12, 12, generator=GENERATOR)
    read, spread = inner @ inner.T, states @ states.T + 0.1 * torch.eye(12)
    shape = shape_mask(read, spread, 0.3)
    covariance = shape.matrix @ shape.matrix.T
    assert 0.5 * float((read * covariance).sum()) == pytest.approx(0.3, rel=1e-3)
    ratio = torch.linalg.solve(covariance.double(), spread.double())
    bits = 0.5 * float(torch.linalg.slogdet(torch.eye(12, dtype=torch.float64) + ratio)[1]) / math.log(2)
    assert bits == pytest.approx(shape.bits, rel=1e-3)


def test_no_budget_is_no_mask() -> None:
    assert not shape_mask(torch.eye(3), torch.eye(3), 0.0).matrix.any()


def test_the_sensitivity_foretells_what_a_small_mask_costs(teacher: Teacher, data: Conversations) -> None:
    batch = data.batch(range(8))
    found = sensitivity(teacher, [batch] * 12, 0, lambda *_: None)
    assert torch.allclose(found, found.T)
    front = batch.front.float()
    # In one direction at all of the positions that count, with another sign at each.
    direction = 0.02 * torch.linalg.eigh(found).eigenvectors[:, -1]
    mask = torch.where(torch.randn(8, 40, 1, generator=GENERATOR) > 0, direction, -direction)
    mask[:, :4] = 0

    def logits(mask: torch.Tensor) -> torch.Tensor:
        middle = run(teacher, teacher.layers, teacher.middle, front + mask) - mask
        back = run(teacher, teacher.layers, range(teacher.middle.stop, 6), middle)
        return (teacher.norm(back) @ teacher.head.T).log_softmax(-1)

    plain, masked = logits(torch.zeros_like(mask)), logits(mask)
    cost = float((plain.exp() * (plain - masked)).sum()) / (8 * 36)
    assert cost == pytest.approx(0.5 * float(direction @ found @ direction), rel=0.35)
