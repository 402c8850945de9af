"""Attention in pieces is attention, whatever the number of pieces and whatever a node does not see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from aparte.model import pieces
from aparte.model.attention import shared_heads
from dialogue import Device, open_link, unsplit_tokens
from running import running_server

HIDDEN = float("-inf")


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 16)
    monkeypatch.setattr(pieces, "SHORTEST", 32)


def drawn(heads: int, shared: int, nodes: int, total: int, size: int = 8) -> tuple[torch.Tensor, ...]:
    """Queries, and keys and values as views into longer buffers, as a cache hands them out."""
    generator = torch.Generator().manual_seed(total)
    query = torch.randn(1, heads, nodes, size, generator=generator)
    key, value = (torch.randn(1, shared, total + 50, size, generator=generator)[:, :, :total] for _ in "kv")
    return query, key, value


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """In float64, by its definition."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = (whole.double().repeat_interleave(repeats, dim=1) for whole in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * 0.3
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ values).transpose(1, 2)


def tree_mask(nodes: int, total: int) -> torch.Tensor:
    """Everything before the step is seen; of the step, each node sees itself and every other one before."""
    mask = torch.zeros(1, 1, nodes, total)
    for node in range(nodes):
        for other in range(nodes):
            if other > node or (node - other) % 2:
                mask[0, 0, node, total - nodes + other] = HIDDEN
    return mask


@pytest.mark.parametrize(("heads", "shared"), [(9, 3), (4, 4), (6, 1)])
@pytest.mark.parametrize("total", [32, 33, 47, 48, 100, 143])
@pytest.mark.parametrize("nodes", [1, 2, 5, 8])
def test_same_as_in_one(heads: int, shared: int, total: int, nodes: int) -> None:
    query, key, value = drawn(heads, shared, nodes, total)
    mask = tree_mask(nodes, total) if nodes > 1 else None
    assert pieces.worthwhile(query, key, value, mask)
    got, _ = shared_heads(nn.Module(), query, key, value, mask, 0.3)
    assert got.shape == (1, nodes, heads, 8)
    assert torch.allclose(got.double(), reference(query, key, value, mask), atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 20, 40])
def test_whole_pieces_out_of_sight_count_nothing(window: int) -> None:
    query, key, value = drawn(6, 2, 4, 101)
    mask = tree_mask(4, 101)
    mask[..., : 101 - 4 - window] = HIDDEN
    # What nobody sees may be anything that is finite.
    key[:, :, : 101 - 4 - window] = 1e4
    value[:, :, : 101 - 4 - window] = -1e4
    got, _ = shared_heads(nn.Module(), query, key, value, mask, 0.3)
    assert torch.allclose(got.double(), reference(query, key, value, mask), atol=1e-5)


def test_one_node_may_have_a_mask() -> None:
    query, key, value = drawn(6, 2, 1, 70)
    mask = torch.zeros(1, 1, 1, 70)
    mask[..., ::3] = HIDDEN
    got, _ = shared_heads(nn.Module(), query, key, value, mask, 0.3)
    assert torch.allclose(got.double(), reference(query, key, value, mask), atol=1e-5)


def test_bad_numbers_are_not_hidden() -> None:
    query, key, value = drawn(6, 2, 1, 70)
    value[0, 0, 5, 3] = float("nan")
    got, _ = shared_heads(nn.Module(), query, key, value, None, 0.3)
    assert got[0, 0, 0, 3].isnan()


def test_half_precision() -> None:
    query, key, value = (tensor.bfloat16() for tensor in drawn(6, 2, 3, 70))
    mask = tree_mask(3, 70).bfloat16()
    got, _ = shared_heads(nn.Module(), query, key, value, mask, 0.3)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), reference(query, key, value, mask.double()), atol=0.03)


@pytest.mark.parametrize(
    ("nodes", "total", "mask"),
    [
        (9, 70, torch.zeros(1, 1, 9, 70)),  # enough pieces of work
        (1, 31, None),  # short
        (2, 70, None),  # causal, which needs a mask here
        (2, 70, torch.ones(1, 1, 2, 70, dtype=torch.bool)),
    ],
)
def test_the_rest_stays_in_one(nodes: int, total: int, mask: torch.Tensor | None) -> None:
    query, key, value = drawn(6, 2, nodes, total)
    assert not pieces.worthwhile(query, key, value, mask)


def test_values_of_another_width_stay_in_one() -> None:
    query, key, value = drawn(6, 2, 1, 70)
    assert not pieces.worthwhile(query, key, value[..., :4], None)


def test_the_text_is_that_of_the_unsplit_model(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    attend = pieces.attend
    monkeypatch.setattr(pieces, "attend", lambda *arguments: used.append(1) or attend(*arguments))
    with running_server(llama_folder) as (_, url):
        device = Device(llama_folder, open_link(llama_folder, url))
        assert device.tokens() == unsplit_tokens(llama_folder)
        device.target.close()
    assert used
