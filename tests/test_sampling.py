"""Choosing tokens: filters against their definitions, noise against the distribution it must give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aparte.config import Sampling
from aparte.errors import UserError
from aparte.sampling import choose, gumbel_noise, keep_min_p, keep_top_k, keep_top_p, process

ROWS = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30)


def kept(logits: torch.Tensor) -> set[int]:
    return {i for i, value in enumerate(logits.tolist()) if value != -math.inf}


@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(1, 40))
def test_top_k_keeps_exactly_k(row: list[float], k: int) -> None:
    logits = torch.tensor([row])
    result = keep_top_k(logits, k)[0] if k < len(row) else logits[0]
    assert len(kept(result)) == min(k, len(row))
    dropped = [row[i] for i in range(len(row)) if i not in kept(result)]
    assert all(row[i] >= value for i in kept(result) for value in dropped)


@settings(deadline=None, max_examples=60)
@given(ROWS, st.floats(0.05, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(row: list[float], p: float) -> None:
    probabilities = torch.tensor(row).softmax(-1).tolist()
    result = kept(keep_top_p(torch.tensor([row]), p)[0])
    mass = sum(probabilities[i] for i in result)
    assert result
    assert mass >= p - 1e-4
    assert mass - min(probabilities[i] for i in result) < p + 1e-4


@settings(deadline=None, max_examples=60)
@given(ROWS, st.floats(0.01, 0.9))
def test_min_p_keeps_what_is_probable_enough(row: list[float], p: float) -> None:
    probabilities = torch.tensor(row).softmax(-1)
    expected = {
        i for i, value in enumerate(probabilities.tolist()) if value >= p * float(probabilities.max())
    }
    assert kept(keep_min_p(torch.tensor([row]), p)[0]) == expected


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    assert kept(keep_top_k(torch.zeros(1, 6), 2)[0]) == {0, 1}


def test_noise_depends_on_seed_and_position_only() -> None:
    assert torch.equal(gumbel_noise(3, 17, 100), gumbel_noise(3, 17, 100))
    assert not torch.equal(gumbel_noise(3, 17, 100), gumbel_noise(3, 18, 100))
    assert not torch.equal(gumbel_noise(3, 17, 100), gumbel_noise(4, 17, 100))
    # A token's noise doesn't depend on the size of the vocabulary (some models pad theirs).
    assert torch.equal(gumbel_noise(3, 17, 100), gumbel_noise(3, 17, 128)[:100])
    # Known values: they must never change between versions or platforms, or seeds lose their meaning.
    known = [-1.495452, -0.351137, -0.785907]
    np.testing.assert_allclose(gumbel_noise(0, 0, 3).numpy(), known, atol=2e-6)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_p=0.9), Sampling(1.5, top_k=5)])
def test_choices_follow_the_processed_distribution(sampling: Sampling) -> None:
    """Chi-square over 20,000 positions; the 0.1 % critical value."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])
    expected = process(logits, sampling).softmax(-1)[0].numpy()
    draws = 20_000
    counts = np.zeros(8)
    for start in range(0, draws, 1000):
        positions = range(start, start + 1000)
        for token in choose(logits.expand(1000, 8), positions, Sampling(**vars(sampling) | {"seed": 5})):
            counts[token] += 1
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    statistic = (((counts - draws * expected) ** 2)[live] / (draws * expected)[live]).sum()
    critical = {4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}
    assert statistic < critical[int(live.sum()) - 1]


def test_rows_are_chosen_as_if_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(0.9, top_p=0.95, seed=11)
    positions = [5, 6, 6, 7, 8, 5]
    together = choose(logits, positions, sampling)
    alone = [choose(logits[i : i + 1], positions[i : i + 1], sampling)[0] for i in range(6)]
    assert together == alone


def test_greedy_is_the_largest_logit() -> None:
    assert choose(torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), [0, 1], Sampling(seed=9)) == [1, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]
