from __future__ import annotations

from itertools import pairwise

import torch

from aparte.speculate.accept import accept
from aparte.speculate.drafter import Outcome
from aparte.speculate.lookahead import Lookahead, NgramPool
from aparte.speculate.tree import DraftTree


def test_the_pool_prefers_longer_matches_and_then_newer_ones() -> None:
    pool = NgramPool(3)
    pool.add_text([1, 2, 3, 9, 2, 4, 1, 2, 5])
    assert list(pool.candidates([1, 2])) == [(5,), (3,), (4, 1), (3, 9)]


def test_the_pool_forgets_the_oldest_per_key() -> None:
    pool = NgramPool(3)
    for token in range(20):
        pool.add([1, token, token])
    assert len(list(pool.candidates([0, 1]))) == 8
    assert next(iter(pool.candidates([0, 1]))) == (19, 19)


def run(drafter: Lookahead, context: list[int], text: list[int], budget: int = 12) -> int:
    """Decode up to the end of ``text`` with a target that knows it; returns the round trips."""
    trips = 0
    follow = dict(pairwise(text))
    while len(context) < len(text):
        tree = drafter.propose(context, budget)
        assert len(tree) <= budget

        def after(path: list[int], start: int = len(context)) -> int:
            # The truth along the true path, something plausible elsewhere.
            end = start + len(path)
            if path == text[start:end] and end < len(text):
                return text[end]
            return follow.get(path[-1] if path else 0, 0)

        choices = [after([])]
        paths: list[list[int]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
            choices.append(after(paths[-1]))
        accepted = accept(tree, choices)
        drafter.observe(Outcome(tree, tuple(choices), accepted, torch.zeros(len(choices), 1)))
        context.extend(accepted.tokens)
        trips += 1
    return trips


def test_a_repetitive_text_takes_few_round_trips() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 10
    for n in range(3, 8):
        trips = run(Lookahead(n), text[:17], text)
        assert trips < (len(text) - 17) / (n - 1) + 2


def test_the_window_finds_ngrams_that_are_in_no_text() -> None:
    """Guesses and the target's answers to them, followed over iterations, are n-grams of their own."""
    drafter, context = Lookahead(3), [10]
    for surprise in (60, 120, 180, 240):  # the text itself never goes on as guessed
        tree = drafter.propose(context, 6)
        choices = (surprise, *(token + 1 for token in tree.tokens))
        accepted = accept(tree, choices)
        assert accepted.tokens == (surprise,)
        drafter.observe(Outcome(tree, choices, accepted, torch.zeros(len(choices), 1)))
        context.append(surprise)
    children = drafter.propose([*context, 10], 12).children()
    assert (children[-1, 11], 12) in children


def test_never_more_round_trips_than_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 250, (60,), generator=generator).tolist()
    assert run(Lookahead(4), text[:5], text) <= 55


def test_a_window_cut_short_by_the_loop_is_understood() -> None:
    drafter = Lookahead(3)
    drafter.propose([1, 2, 3], 12)
    drafter.observe(Outcome(DraftTree(), (4,), accept(DraftTree(), (4,)), torch.zeros(1, 1)))
    assert len(drafter.propose([1, 2, 3, 4], 12)) <= 12


def test_a_shorter_context_starts_over() -> None:
    drafter = Lookahead(3)
    run(drafter, [1, 2, 3], [1, 2, 3] * 6)
    assert len(drafter.propose([1, 2], 12)) <= 12
