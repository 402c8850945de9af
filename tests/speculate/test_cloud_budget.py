"""The number of nodes for the least time of the cloud: against every fixed number, and what it learns."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from aparte.speculate.cloud_budget import FIRST_NODES, CloudBudget
from aparte.speculate.tree import DraftTree

STEPS = 1500
Cost = Callable[[int], float]
#: A pass by its rows: flat at first, then dear, and one that is nearly free.
COSTS: dict[str, Cost] = {
    "processor": lambda rows: 23 + 0.7 * rows + 1.6 * max(0, rows - 5),
    "accelerator": lambda rows: 12 + 0.02 * rows,
    "dear": lambda rows: 5 + 5.0 * rows,
}


def chain(*probabilities: float) -> DraftTree:
    count = len(probabilities)
    return DraftTree(tuple(range(count)), tuple(range(-1, count - 1)), probabilities)


def draft(rng: random.Random) -> tuple[DraftTree, int]:
    """Sometimes the draft is sure, mostly it is not; and how many of its tokens are right."""
    chance = 0.95 if rng.random() < 0.25 else 0.35
    reached = [chance ** (1 + depth) for depth in range(24)]
    right = next((depth for depth in range(24) if rng.random() > chance), 24)
    return chain(*reached), right


def ms_per_token(
    cost: Cost, trim: Callable[[DraftTree], DraftTree], budget: CloudBudget | None = None
) -> float:
    """What the cloud takes; the first third of the steps is for learning."""
    rng, total_ms, total = random.Random(4), 0.0, 0
    for number in range(STEPS):
        tree, right = draft(rng)
        kept = trim(tree)
        tokens, ms = 1 + min(right, len(kept)), cost(1 + len(kept))
        if budget is not None:
            hoped = 1 + sum(kept.probabilities)
            budget.observe(1 + len(kept), 500.0, ms, cloud_ms=ms, tokens=tokens, hoped=hoped)
        if number > STEPS / 3:
            total_ms, total = total_ms + ms, total + tokens
    return total_ms / total


@pytest.mark.parametrize("name", COSTS)
def test_no_fixed_number_takes_the_cloud_less_time(name: str) -> None:
    cost, budget = COSTS[name], CloudBudget()
    learned = ms_per_token(cost, budget.trim, budget)
    fixed = [ms_per_token(cost, lambda tree, n=count: tree.head(n)) for count in range(25)]  # type: ignore[misc]
    assert learned < 1.01 * min(fixed)
    if name == "processor":  # here some steps are worth many nodes, and most are not
        assert learned < 0.93 * min(fixed)
    assert learned < cost(1)


def test_the_round_trip_does_not_matter() -> None:
    sizes = []
    for step_ms in (30.0, 3000.0):
        budget = CloudBudget()
        for _ in range(40):
            budget.observe(5, step_ms, 20.0, cloud_ms=10.0, tokens=2, hoped=2.0)
        sizes.append(len(budget.trim(chain(*(0.5 / (1 + rank) for rank in range(16))))))
    assert sizes[0] == sizes[1]


def test_estimates_that_promise_too_much_buy_less() -> None:
    sizes = []
    for tokens in (3, 1):
        budget = CloudBudget()
        for nodes in (2, 6) * 60:
            budget.observe(nodes, 0.0, 0.0, cloud_ms=20.0 + nodes, tokens=tokens, hoped=3.0)
        budget._tokens, budget._ms = 2.0, 24.0  # the same rate for both
        sizes.append(len(budget.trim(chain(*([0.12] * 8)))))
    assert sizes == [8, 0]


def test_the_first_step_is_careful_and_the_room_follows() -> None:
    budget = CloudBudget()
    assert budget.tokens_per_ms is None
    assert len(budget.trim(chain(*([0.9] * 16)))) == FIRST_NODES
    assert budget.room(32) == 32
    for _ in range(30):
        budget.observe(3, 0.0, 0.0, cloud_ms=10.0, tokens=1, hoped=1.0)
        budget.trim(chain(*([0.001] * 16)))
    assert budget.room(32) < 8
