"""The accounting against Google's library, theorem 8 integrated numerically, and published values."""

from __future__ import annotations

import math
import sys

import mpmath
import pytest
from absl import logging as absl_logging
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

from aparte.errors import UserError
from aparte.privacy.noise import delta_of, gaussian_sigma

# That library's log keeps the standard error that it finds when it is imported, here pytest's own, and closes
# it as soon as somebody sets up logging anew (a web server does) while another is in its place. It spares
# this one.
absl_logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


def reference_delta(sigma: float, epsilon: float) -> float:
    """The hockey-stick divergence of N(1, s^2) and N(0, s^2), by integration in 40 digits."""
    with mpmath.workdps(40):
        s = mpmath.mpf(sigma)
        start = mpmath.mpf(epsilon) * s**2 + mpmath.mpf(1) / 2  # where the densities' ratio is e^epsilon

        def excess(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(x, 1, s) - mpmath.exp(epsilon) * mpmath.npdf(x, 0, s)

        return float(mpmath.quad(excess, [start, start + 2 * s, start + 10 * s, start + 40 * s]))


EPSILONS = pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 20.0, 200.0])
DELTAS = pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])


@EPSILONS
@DELTAS
def test_the_reference_library_finds_the_same(epsilon: float, delta: float) -> None:
    """dp-accounting: its delta of our noise, and the noise that it would take itself."""
    sigma = gaussian_sigma(epsilon, delta, sensitivity=3.0)
    theirs = GaussianPrivacyLoss(sigma, sensitivity=3.0)
    assert theirs.get_delta_for_epsilon(epsilon) == pytest.approx(delta, rel=1e-6)
    assert delta_of(sigma, epsilon, 3.0) == pytest.approx(delta, rel=1e-6)
    wanted = DifferentialPrivacyParameters(epsilon, delta)
    chosen = GaussianPrivacyLoss.from_privacy_guarantee(wanted, sensitivity=3.0)
    assert sigma == pytest.approx(chosen.standard_deviation, rel=1e-5)


@EPSILONS
@DELTAS
def test_the_smallest_sigma_has_just_that_delta(epsilon: float, delta: float) -> None:
    sigma = gaussian_sigma(epsilon, delta)
    assert reference_delta(sigma, epsilon) == pytest.approx(delta, rel=1e-6)
    assert reference_delta(0.99 * sigma, epsilon) > delta


def test_published_value() -> None:
    """Balle and Wang's own code prints this for epsilon 1, delta 1e-5."""
    assert gaussian_sigma(1.0, 1e-5) == pytest.approx(3.730631634816464, rel=1e-9)


def test_it_beats_the_classical_bound() -> None:
    classical = math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
    assert gaussian_sigma(0.5, 1e-5) < classical


def test_it_scales_with_the_sensitivity() -> None:
    assert gaussian_sigma(2.0, 1e-6, 7.0) == pytest.approx(7 * gaussian_sigma(2.0, 1e-6))


def test_delta_falls_with_noise_and_epsilon() -> None:
    assert delta_of(1, 1) > delta_of(2, 1) > delta_of(2, 2) > 0


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (1, 0), (1, 1), (math.inf, 0.1)])
def test_impossible_wishes(epsilon: float, delta: float) -> None:
    with pytest.raises(UserError, match="epsilon"):
        gaussian_sigma(epsilon, delta)
