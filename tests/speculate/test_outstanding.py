"""Proposals whose outcome is to come: which one an outcome is about, and which ones will never have any."""

from __future__ import annotations

import torch

from aparte.speculate.accept import Accepted
from aparte.speculate.drafter import Outcome
from aparte.speculate.outstanding import MOST, Outstanding
from aparte.speculate.tree import DraftTree


def outcome(context: tuple[int, ...] = ()) -> Outcome:
    return Outcome(DraftTree((), (), ()), (7,), Accepted((), (7,)), torch.zeros(1, 8), context)


def under_way(*lengths: int) -> Outstanding[int]:
    """Proposals, in this order, that are called by the length of their context."""
    found: Outstanding[int] = Outstanding()
    for length in lengths:
        found.begin((1,) * length)
        found.add((1,) * length, length)
    return found


def test_an_outcome_settles_the_proposal_of_its_context() -> None:
    found = under_way(3, 5, 8)
    assert [found.settle(outcome((1,) * length)) for length in (3, 5, 8)] == [3, 5, 8]
    assert not found


def test_an_outcome_without_a_context_is_that_of_the_last_one() -> None:
    assert under_way(3, 5).settle(outcome()) == 5


def test_a_new_one_says_whether_another_is_under_way() -> None:
    found = under_way(3)
    assert found.begin((1,) * 5)
    assert not found.begin((1,) * 3), "it is proposed again, so it was wrong"


def test_what_goes_beyond_a_new_one_was_wrong() -> None:
    found = under_way(3, 5, 8, 4)
    assert [found.settle(outcome((1,) * length)) for length in (3, 4)] == [3, 4]
    assert not found


def test_shorter_ones_are_of_an_answer_that_ended() -> None:
    found = under_way(3, 5)
    assert found.settle(outcome((1,) * 5)) == 5
    assert not found


def test_no_more_are_kept_than_can_be_under_way() -> None:
    found = under_way(*range(1, MOST + 3))
    assert found.settle(outcome((1,) * 3)) == 3
    assert len(found._proposals) == MOST - 1
