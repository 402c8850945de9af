"""Recycling: the best next tokens of every node's logits, found by blocks."""

from __future__ import annotations

import pytest
import torch

from aparte.speculate.accept import accept
from aparte.speculate.drafter import Outcome
from aparte.speculate.recycling import KEPT, Recycling, RunnerUp
from aparte.speculate.tree import DraftTree


@pytest.mark.parametrize("vocab", [300, 49_152])
def test_shares_are_probabilities(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, vocab) * 4
    tree, choices = DraftTree((20,), (-1,), (0.5,)), tuple(logits.argmax(dim=-1).tolist())
    recycling = Recycling()
    recycling.learn([5, 6], Outcome(tree, choices, accept(tree, choices), logits))
    for row, (place, token) in enumerate((((5, 6), 6), ((6, 20), 20))):
        expected = logits[row].softmax(dim=-1).topk(KEPT)
        stored = recycling.after_two[place]
        assert stored == recycling.after_one[token]
        assert [token for token, _ in stored] == expected.indices.tolist()
        assert [share for _, share in stored] == pytest.approx(expected.values.tolist(), rel=1e-5)


def test_the_runner_up_is_what_was_not_chosen() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])
    source, tree = RunnerUp(), DraftTree()
    source.learn([1], Outcome(tree, (7,), accept(tree, (7,)), logits))
    assert [candidate.token for candidate in source.candidates(True)] == [8, 9]


def test_without_logits_nothing_is_known_of_what_nearly_came() -> None:
    """A target that chooses tokens itself tells its choices only."""
    source, choice = RunnerUp(), (7,)
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    source.learn([5, 6], Outcome(DraftTree(), choice, accept(DraftTree(), choice), logits))
    assert source.candidates(source.start([6]))
    source.learn([5, 7], Outcome(DraftTree(), choice, accept(DraftTree(), choice), torch.empty(0, 300)))
    assert source.candidates(source.start([7])) == []


def test_choices_teach_where_there_are_no_logits() -> None:
    """As in draft mode; a node without a choice teaches nothing."""
    recycling = Recycling()
    tree = DraftTree((7, 8), (-1, -1), (0.5, 0.4))
    for choice in (20, 21):
        choices = (7, choice, -1)
        recycling.learn([5, 6], Outcome(tree, choices, accept(tree, choices), torch.empty(0, 64)))
    found = {candidate.token: candidate.prior for candidate in recycling.candidates(recycling.start([6, 7]))}
    assert list(found) == [21, 20]
    assert found[21] > found[20]
    assert recycling.candidates(recycling.start([6, 8])) == []
    assert [one.token for one in recycling.candidates(recycling.start([5, 6]))] == [7]
