from __future__ import annotations

import torch

from aparte.speculate.accept import accept
from aparte.speculate.drafter import Outcome
from aparte.speculate.jacobi import Jacobi


def answer(drafter: Jacobi, context: list[int], budget: int, rule: dict[int, int]) -> list[int]:
    """One round trip with a target whose next token depends on the last one only."""
    tree = drafter.propose(context, budget)
    choices = tuple(rule[token] for token in (context[-1], *tree.tokens))
    accepted = accept(tree, choices)
    drafter.observe(Outcome(tree, choices, accepted, torch.zeros(len(choices), 1)))
    return list(accepted.tokens)


COUNT = {token: token + 1 for token in range(100)}


def test_iterates_to_the_sequential_text() -> None:
    drafter, context = Jacobi(4), [0]
    while len(context) < 30:
        context += answer(drafter, context, 8, COUNT)
    assert context == list(range(len(context)))


def test_a_constant_text_is_a_fixed_point_from_the_start() -> None:
    drafter = Jacobi(4)
    assert answer(drafter, [7], 8, {7: 7}) == [7] * 5


def test_the_guesses_are_the_targets_answers() -> None:
    drafter = Jacobi(4)
    # Guesses 0 0 0 0; the target says 1 after each. One is right; the others become guesses.
    assert answer(drafter, [0], 8, COUNT) == [1]
    assert drafter.propose([0, 1], 8).tokens[:4] == (1, 1, 1, 1)


def test_the_budget_bounds_the_block() -> None:
    assert len(Jacobi(8).propose([1], 3)) == 3
    assert len(Jacobi(8).propose([1], 0)) == 0
