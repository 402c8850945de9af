"""The most probable tokens of a row of logits, found by blocks."""

from __future__ import annotations

import pytest
import torch

from aparte.likely import BLOCK, first_largest, largest, likely

KEPT = 6


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


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_shares_are_those_of_the_full_distribution(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 5000) * 4).to(kind)
    for row, expected in zip(likely(logits, KEPT), logits.float().softmax(dim=-1), strict=True):
        best = expected.topk(KEPT)
        assert [token for token, _ in row] == best.indices.tolist()
        assert [share for _, share in row] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_of_no_rows_there_is_nothing() -> None:
    assert likely(torch.empty(0, 300), KEPT) == []


@pytest.mark.parametrize("vocab", [1, 7, 8 * BLOCK - 1, 8 * BLOCK, 49_152, 50_001])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_first_of_equally_large_ones(vocab: int, kind: torch.dtype) -> None:
    """As ``argmax`` has it, also where nearly all are equal, within a block, among blocks and behind them."""
    torch.manual_seed(vocab)
    logits = torch.randint(-3, 4, (200, vocab)).to(kind)
    logits[:50] = torch.randn(50, vocab).to(kind)
    logits[50:100, : vocab // 2] = float("-inf")
    assert torch.equal(first_largest(logits), logits.argmax(dim=-1))


def test_no_rows_have_no_largest() -> None:
    assert first_largest(torch.empty(0, 49_152)).shape == (0,)
