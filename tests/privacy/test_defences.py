"""What each defence does to rows, and what it says of itself."""

from __future__ import annotations

import pytest
import torch

from aparte.config import Cut
from aparte.errors import UserError
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Noise, Nothing, Pinned, Quantised, RandomCut, parse_defence
from aparte.privacy.noise import gaussian_sigma

ROWS = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)) * 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "setting", ["none", "int8", "int4", "int2", "noise:1000", "noise:0.5", "random-cut:2-8"]
)
def test_settings_read_and_write_alike(setting: str) -> None:
    assert parse_defence(setting).setting == setting


@pytest.mark.parametrize(
    "setting",
    ["", "int9", "int1", "int", "noise", "noise:-1", "noise:x", "random-cut:8-2", "random-cut:3", "none:1"],
)
def test_unknown_settings_name_the_known_ones(setting: str) -> None:
    with pytest.raises(UserError, match="Known: none, int8"):
        parse_defence(setting)


def test_nothing_does_nothing() -> None:
    assert Nothing().protect(ROWS, 3, generator()) is ROWS
    assert Nothing().bytes_ratio(32, 64) == 1


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantised_rows_have_so_many_levels(bits: int) -> None:
    sent = Quantised(bits=bits).protect(ROWS, 0, generator())
    step = ROWS.abs().amax(1) / (2 ** (bits - 1) - 1)
    assert all(len(row.unique()) <= 2**bits - 1 for row in sent)
    assert bool(((sent - ROWS).abs().amax(1) <= step / 2 + 1e-5).all())


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    whole = Quantised(bits=4).protect(ROWS, 0, generator())
    assert torch.equal(Quantised(bits=4).protect(ROWS[7:8], 7, generator()), whole[7:8])


def test_bytes_of_quantised_rows() -> None:
    assert Quantised(bits=8).bytes_ratio(576, 1152) == pytest.approx(578 / 1152)


class TestNoise:
    def noise(self, epsilon: float = 10.0) -> Noise:
        noise = Noise(epsilon)
        noise.calibrate(ROWS, 100 * ROWS[:3])
        return noise

    def test_deviation_is_that_of_the_accounting(self) -> None:
        noise = self.noise()
        first, rest = noise.bounds
        sent = torch.stack([noise.protect(ROWS[:2], 0, generator(seed)) for seed in range(400)])
        for place, bound in enumerate((first, rest)):
            sigma = gaussian_sigma(10.0, 1e-5, 2 * bound)
            assert noise.sigma(place) == pytest.approx(sigma)
            assert float(sent[:, place].std(0).mean()) == pytest.approx(sigma, rel=0.02)

    def test_rows_are_clipped_to_the_bound_that_the_sensitivity_is_made_of(self) -> None:
        noise = self.noise()
        huge = noise.expected(1e6 * ROWS, torch.arange(1, 51))
        torch.testing.assert_close(huge.norm(dim=1), torch.full((50,), noise.bounds[1]))
        small = 1e-3 * ROWS
        assert torch.equal(noise.expected(small, torch.arange(50)), small)

    def test_the_first_token_has_a_bound_of_its_own(self) -> None:
        first, rest = self.noise().bounds
        assert first > 50 * rest

    def test_it_states_its_guarantee(self) -> None:
        text = self.noise().describe()
        assert "epsilon 10 and delta 1e-05" in text

    def test_more_epsilon_less_noise(self) -> None:
        assert self.noise(1).sigma(1) > self.noise(10).sigma(1) > self.noise(1000).sigma(1)


def test_a_random_cut_keeps_the_back() -> None:
    assert RandomCut(low=2, high=4).cuts(Cut(9, 3)) == (Cut(2, 3), Cut(3, 3), Cut(4, 3))


def test_a_pinned_defence_has_one_cut() -> None:
    pinned: Defence = Pinned(RandomCut(low=2, high=4), Cut(3, 2))
    assert pinned.cuts(Cut(9, 9)) == (Cut(3, 2),)
    assert pinned.protect(ROWS, 0, generator()) is ROWS
