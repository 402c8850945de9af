"""How many nodes a pass should have, from what passes took."""

from __future__ import annotations

import random

import pytest

from aparte.cloud.pass_cost import (
    DEFAULT_NODES,
    LEAST_NODES,
    MOST_NODES,
    PIECE_STRETCH,
    STRETCH,
    PassCost,
)


def observed(fixed_ms: float, each_ms: float, *, noise: float = 0.0, passes: int = 200) -> PassCost:
    rng, cost = random.Random(1), PassCost()
    for _ in range(passes):
        nodes = rng.choice([1, 4, 8, 16, 40])
        cost.observe(nodes, (fixed_ms + each_ms * nodes) * (1 + noise * rng.random()))
    return cost


@pytest.mark.parametrize(("fixed_ms", "each_ms"), [(20.0, 3.0), (500.0, 100.0), (5.0, 0.1)])
def test_it_finds_what_passes_cost(fixed_ms: float, each_ms: float) -> None:
    cost = observed(fixed_ms, each_ms)
    assert cost.fit_ms == pytest.approx((fixed_ms, each_ms), rel=1e-3)


def test_a_full_pass_takes_a_certain_multiple_of_an_empty_one() -> None:
    cost = observed(20.0, 3.0)
    assert 20 + 3 * cost.full == pytest.approx(20 * STRETCH, abs=3)


def test_noise_moves_it_a_little() -> None:
    assert observed(20.0, 3.0, noise=0.5).full == pytest.approx(60, rel=0.4)


def test_what_is_long_ago_is_forgotten() -> None:
    cost = observed(20.0, 3.0)
    for nodes in range(1, 201):
        cost.observe(nodes % 30 + 1, 40 + 10 * (nodes % 30 + 1))
    assert cost.full == pytest.approx(9 * 40 / 10, abs=2)


def test_passes_of_one_size_say_nothing_about_others() -> None:
    cost = PassCost()
    assert (cost.full, cost.fit_ms) == (DEFAULT_NODES, None)
    for _ in range(50):
        cost.observe(8, 50.0)
    assert (cost.full, cost.fit_ms) == (DEFAULT_NODES, None)


@pytest.mark.parametrize(
    ("fixed_ms", "each_ms", "nodes"),
    [(20.0, 0.0, MOST_NODES), (20.0, 0.01, MOST_NODES), (1.0, 3.0, LEAST_NODES)],
)
def test_it_stays_within_bounds(fixed_ms: float, each_ms: float, nodes: int) -> None:
    assert observed(fixed_ms, each_ms).full == nodes


def test_longer_passes_that_got_faster_are_no_reason_for_nonsense() -> None:
    cost = PassCost()
    for nodes in (1, 50) * 10:
        cost.observe(nodes, 100.0 - nodes)
    assert cost.full == MOST_NODES


def test_a_piece_of_a_prompt_takes_less_than_a_full_pass() -> None:
    cost = observed(20.0, 1.0)
    assert 20 + cost.piece == pytest.approx(20 * PIECE_STRETCH, abs=1)
    assert PassCost().piece == DEFAULT_NODES // 2


@pytest.mark.parametrize(("fixed_ms", "each_ms"), [(20.0, 0.0), (20.0, 0.01), (1.0, 3.0), (5.0, 0.1)])
def test_a_piece_is_at_least_one_node_and_at_most_half_of_a_pass(fixed_ms: float, each_ms: float) -> None:
    cost = observed(fixed_ms, each_ms)
    assert 1 <= cost.piece <= cost.full // 2
