from __future__ import annotations

import random

import pytest

from aparte.speculate.budget import FIRST_NODES, NodeBudget, StepCost
from aparte.speculate.tree import DraftTree


def tree(*probabilities: float) -> DraftTree:
    count = len(probabilities)
    return DraftTree(tuple(range(count)), tuple(range(-1, count - 1)), probabilities)


def measured(fixed_ms: float, ms_per_node: float, steps: int = 60) -> NodeBudget:
    budget, sizes = NodeBudget(), random.Random(0)
    for _ in range(steps):
        nodes = sizes.randint(1, 20)
        budget.observe(nodes, fixed_ms + ms_per_node * nodes)
    return budget


@pytest.mark.parametrize(("fixed", "slope"), [(100.0, 3.0), (20.0, 0.2), (150.0, 10.0)])
def test_the_cost_of_a_node_is_learned(fixed: float, slope: float) -> None:
    cost = measured(fixed, slope).cost
    assert cost.ms_per_node == pytest.approx(slope, rel=0.1, abs=0.1)
    assert cost.expect_ms(10) == pytest.approx(fixed + 10 * slope, rel=0.05)


def test_the_size_maximises_tokens_per_time() -> None:
    probabilities = [0.9 / (1 + rank) for rank in range(32)]
    for fixed, slope in ((5.0, 2.0), (80.0, 2.0), (150.0, 0.1), (20.0, 8.0)):
        budget = measured(fixed, slope)
        rates = [
            (1 + sum(probabilities[:n])) / budget.cost.expect_ms(1 + n) for n in range(len(probabilities) + 1)
        ]
        assert len(budget.trim(tree(*probabilities))) == rates.index(max(rates))


def test_a_longer_round_trip_buys_more_nodes_and_dear_nodes_fewer() -> None:
    probabilities = tree(*(0.5 / (1 + rank) for rank in range(32)))
    near, far = measured(10, 2).trim(probabilities), measured(150, 2).trim(probabilities)
    assert len(near) < len(far)
    assert len(measured(150, 20).trim(probabilities)) < len(far)


def test_nothing_is_sent_where_it_does_not_pay() -> None:
    """Acceptance near zero: the width goes to zero, so that it is never slower than sequential."""
    assert len(measured(20, 2).trim(tree(*([0.01] * 16)))) == 0


def test_the_first_step_is_careful() -> None:
    assert len(NodeBudget().trim(tree(*([0.9] * 32)))) == FIRST_NODES


def test_a_changed_link_is_noticed_within_ten_steps() -> None:
    budget = measured(20, 1)
    for _ in range(10):
        budget.observe(8, 150 + 8)
    assert budget.cost.expect_ms(8) > 90


def test_one_stall_does_not_overturn_what_is_known() -> None:
    budget = measured(80, 2)
    before = budget.cost.expect_ms(8)
    budget.observe(8, 5000)
    assert budget.cost.expect_ms(8) < 1.5 * before


def test_steps_of_one_size_leave_the_slope_to_the_prior() -> None:
    cost = StepCost()
    for _ in range(30):
        cost.observe(5, 100)
    assert cost.ms_per_node == pytest.approx(1.0)
    assert cost.expect_ms(5) == pytest.approx(100)
