from __future__ import annotations

import random

import pytest

from aparte.speculate.budget import FIRST_NODES, ComputeCurve, NodeBudget, StepCost
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
    budget = measured(fixed, slope)
    assert budget.rest.ms_per_node == pytest.approx(slope, rel=0.1, abs=0.1)
    assert budget.expect_ms(10) == pytest.approx(fixed + 10 * slope, rel=0.05)


def test_the_size_maximises_tokens_per_time() -> None:
    probabilities = [0.9 / (1 + rank) for rank in range(32)]
    for fixed, slope in ((5.0, 2.0), (80.0, 2.0), (150.0, 0.1), (20.0, 8.0)):
        budget = measured(fixed, slope)
        rates = [
            (1 + sum(probabilities[:n])) / budget.expect_ms(1 + n) for n in range(len(probabilities) + 1)
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
    assert budget.expect_ms(8) > 90


def test_one_stall_does_not_overturn_what_is_known() -> None:
    budget = measured(80, 2)
    before = budget.expect_ms(8)
    budget.observe(8, 5000)
    assert budget.expect_ms(8) < 1.5 * before


def test_steps_of_one_size_leave_the_slope_to_the_prior() -> None:
    cost = StepCost()
    for _ in range(30):
        cost.observe(5, 100)
    assert cost.ms_per_node == pytest.approx(1.0)
    assert cost.expect_ms(5) == pytest.approx(100)


def staircase(nodes: int) -> float:
    """Rows in blocks of six, as some kernels work through them."""
    return 20.0 + 15.0 * ((nodes - 1) // 6)


class TestComputeCurve:
    def test_steps_that_come_nearly_free_are_taken(self) -> None:
        """A line would find each node equally dear."""
        budget, sizes = NodeBudget(), random.Random(0)
        for _ in range(150):
            nodes = sizes.randint(1, 20)
            budget.observe(nodes, 5 + staircase(nodes), staircase(nodes))
        assert budget.expect_ms(6) - budget.expect_ms(2) < 4
        assert budget.expect_ms(12) - budget.expect_ms(6) > 9
        probabilities = [0.3 / (1 + 0.2 * rank) for rank in range(32)]
        rates = [(1 + sum(probabilities[:n])) / (5 + staircase(1 + n)) for n in range(33)]
        chosen = len(budget.trim(tree(*probabilities)))
        assert rates[chosen] > 0.97 * max(rates)
        assert chosen in (4, 5)  # one more would begin another block of rows

    def test_a_changed_link_leaves_the_curve(self) -> None:
        budget, sizes = NodeBudget(), random.Random(0)
        for step in range(160):
            nodes = sizes.randint(1, 20)
            budget.observe(nodes, (5 if step < 150 else 150) + staircase(nodes), staircase(nodes))
        assert budget.rest.expect_ms(8) > 90
        assert budget.compute.expect_ms(6) - budget.compute.expect_ms(2) < 4

    def test_it_never_falls_and_goes_on_beyond_what_was_seen(self) -> None:
        curve, sizes = ComputeCurve(), random.Random(1)
        for _ in range(60):
            nodes = sizes.randint(1, 12)
            curve.observe(nodes, 30 + 3 * nodes + sizes.uniform(-8, 8))
        heights = [curve.expect_ms(nodes) for nodes in range(1, 257)]
        assert heights == sorted(heights)
        assert heights[31] > heights[11] + 20

    def test_one_stall_does_not_overturn_it(self) -> None:
        curve = ComputeCurve()
        for _ in range(60):
            curve.observe(8, 40)
        curve.observe(8, 4000)
        assert curve.expect_ms(8) < 50


def test_no_more_is_proposed_than_may_be_kept() -> None:
    budget, likely = measured(20, 8), tree(*(0.5 / (1 + rank) for rank in range(32)))
    assert budget.room(32) == 32
    for _ in range(20):
        kept = len(budget.trim(likely))
    assert kept < budget.room(32) < 16
    for _ in range(60):  # another link, on which nodes are cheap
        budget.observe(random.Random(0).randint(1, 20), 200)
    for _ in range(8):
        budget.trim(likely.head(budget.room(32)))
    assert budget.room(32) == 32
