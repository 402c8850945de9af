"""Recycling: the best next tokens of every node's logits, found by blocks."""

from __future__ import annotations

import pytest
import torch

from aparte.speculate.accept import accept
from aparte.speculate.drafter import Outcome
from aparte.speculate.recycling import BLOCK, KEPT, Recycling, RunnerUp, largest
from aparte.speculate.tree import DraftTree


@pytest.mark.parametrize("vocab", [KEPT, 300, 8 * KEPT * BLOCK - 1, 8 * KEPT * BLOCK, 49_152, 50_001])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_largest_are_those_of_topk(rows: int, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab)
    values, ids = largest(logits, KEPT)
    expected = logits.topk(KEPT, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("places", [range(6), range(49_990, 50_001), (0, BLOCK - 1, BLOCK, 50_000, 7, 9)])
def test_the_largest_side_by_side_and_at_the_ends(places: range | tuple[int, ...]) -> None:
    logits = torch.randn(1, 50_001)
    logits[0, list(places)] += 100
    assert torch.equal(largest(logits, KEPT)[1], logits.topk(KEPT, dim=-1).indices)


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
