"""The mask's shape: what is given away costs what was asked, and no more of it could be had for that."""

from __future__ import annotations

import pytest
import torch

from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations
from aparte.privatize.net import run
from aparte.privatize.shaping import OUTSIZED, sensitivity, shape_veil, weak_coordinates

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("price", [0.5, 5.0, 1e9])
def test_as_many_coordinates_are_given_away_as_the_price_allows(price: float) -> None:
    inner, states = (torch.randn(12, 12, generator=GENERATOR) for _ in range(2))
    read, spread = 0.1 * inner @ inner.T, states @ states.T + 0.1 * torch.eye(12)
    left, right = weak_coordinates(read, spread, price)
    count = left.shape[1]
    assert torch.allclose(right @ left, torch.eye(count), atol=1e-3)
    assert torch.allclose(right @ spread @ right.T, torch.eye(count), atol=1e-3), "of the states' own scale"
    costs = (left.T @ read @ left).diagonal()  # of another token's value in each
    assert float(costs.sum()) <= price
    assert torch.equal(costs, costs.sort().values)
    if count < 12:
        _, more = weak_coordinates(read, spread, 2 * price + 1)
        assert len(more) > count
    else:
        assert price == 1e9


def test_no_price_is_no_mask(teacher: Teacher, data: Conversations) -> None:
    veil = shape_veil(teacher, [data.batch(range(8))], torch.eye(32), 0.0)
    assert veil.size == 0
    hidden = torch.randn(5, 32, generator=GENERATOR)
    values = veil.values(torch.rand(5), torch.randn(5, 0))
    assert torch.equal(hidden + veil.mask(hidden, values), hidden)


def test_a_masked_state_has_a_decoy_s_coordinates_and_its_own_elsewhere(
    teacher: Teacher, data: Conversations
) -> None:
    batch = data.batch(range(8))
    read = sensitivity(teacher, [batch], 0, lambda *_: None)
    veil = shape_veil(teacher, [batch], read, float(read.trace()) / 4)
    assert 0 < veil.size < 32
    states = batch.front[:, OUTSIZED:].flatten(0, 1).float()
    values = veil.values(torch.rand(len(states)), torch.randn(len(states), veil.size))
    sent = states + veil.mask(states, values)
    assert torch.allclose((sent - veil.centre) @ veil.right.T, values, atol=1e-3)
    keep = torch.eye(32) - veil.left @ veil.right
    assert torch.allclose((sent - states) @ keep.T, torch.zeros_like(sent), atol=1e-3)
    # Decoys look like states there: the same scale, and tokens of the text.
    own = (states - veil.centre) @ veil.right.T
    assert float(values.std() / own.std()) == pytest.approx(1, rel=0.25)
    assert float(veil.shares.sum()) == pytest.approx(1)


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
