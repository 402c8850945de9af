from __future__ import annotations

from itertools import pairwise

import torch

from aparte.speculate.accept import accept
from aparte.speculate.drafter import Drafter, Outcome
from aparte.speculate.lookahead import Lookahead, LookaheadSource, NgramPool
from aparte.speculate.merge import Merged
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


def run(drafter: Drafter, context: list[int], text: list[int], budget: int = 12) -> int:
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


# -- As a source of a merged tree --------------------------------------------------------------------


def said(source: LookaheadSource, context: list[int], *path: int) -> list[int]:
    place = source.start(context)
    for token in path:
        place = source.advance(place, token)
    return [candidate.token for candidate in source.candidates(place) if candidate.kind[0] == "lookahead"]


def test_the_source_offers_the_pools_candidates_at_any_place() -> None:
    text = [1, 2, 3, 9, 2, 4, 1, 2, 5, 8, 1, 2]
    assert said(LookaheadSource(3), text) == [5, 3, 4]  # after "1 2", the newest first; then after "2"
    assert said(LookaheadSource(3), text, 3) == [9]
    assert said(LookaheadSource(3), text, 7) == []
    assert said(LookaheadSource(3), text, 7, 1) == [2]  # below a token that nobody proposed, too


def test_a_longer_match_has_another_kind_and_comes_first() -> None:
    source = LookaheadSource(5)
    place = source.start([1, 2, 3, 4, 5, 9, 3, 4, 6, 9, 9, 1])
    for token in (2, 3):
        place = source.advance(place, token)
    # "1 2 3" was followed by 4 5; then "3 4" by 6, which is newer, but matches less.
    place = source.advance(place, 4)
    kinds = {candidate.token: candidate.kind for candidate in source.candidates(place)}
    assert [token for token, kind in kinds.items() if kind[0] == "lookahead"] == [5, 6]
    assert kinds[5] == ("lookahead", 4, 0)
    assert kinds[6] == ("lookahead", 2, 1)


def test_the_window_is_an_unlikely_chain_below_the_root() -> None:
    source = LookaheadSource(4)
    place = source.start([10, 20, 30])
    chain = []
    while window := [c for c in source.candidates(place) if c.kind[0] == "window"]:
        (guess,) = window
        assert guess.prior < 0.1
        chain.append(guess.token)
        assert source.advance(place, 99).in_window is None
        place = source.advance(place, guess.token)
    assert len(chain) == 4
    assert set(chain) <= {10, 20, 30}


def test_the_source_finds_ngrams_that_are_in_no_text() -> None:
    """As the drafter that stands for itself, from a tree that holds the window."""
    source, context = LookaheadSource(3), [10]
    for surprise in (60, 120, 180, 240):
        place, tokens = source.start(context), []
        for _ in range(3):
            (guess,) = [c.token for c in source.candidates(place) if c.kind[0] == "window"]
            tokens.append(guess)
            place = source.advance(place, guess)
        tree = DraftTree(tuple(tokens), (-1, 0, 1), (0.1, 0.01, 0.001))
        choices = (surprise, *(token + 1 for token in tokens))
        source.learn(context, Outcome(tree, choices, accept(tree, choices), torch.zeros(4, 1)))
        context = [*context, surprise]
    assert said(source, [*context, 10]) == [60, 11]  # from the text; from the window
    assert said(source, [*context, 10], 11) == [12]


def test_the_source_makes_a_repetitive_text_take_few_round_trips() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 10
    assert run(Merged([LookaheadSource(3)]), text[:17], text) <= 10


def test_contexts_that_run_ahead_and_are_taken_back() -> None:
    """The pool may keep what was a wrong guess; what is really there has to be there too."""
    source = LookaheadSource(3)
    source.start([1, 2, 3])
    source.start([1, 2, 3, 4, 5, 6])
    assert said(source, [1, 2, 3, 7, 8, 9, 3]) == [7, 4]
    assert said(source, [1, 2, 3, 7, 8, 9, 3], 7) == [8]
    assert said(source, [5, 5, 2]) == [3]  # another text: what was seen is not forgotten
