"""Noise accounting: the smallest Gaussian noise for a given (epsilon, delta).

Source: the analytic Gaussian mechanism, Balle and Wang 2018 (arXiv 1805.06530), theorem 8: adding
``N(0, sigma^2 I)`` to a vector of sensitivity ``D`` (the largest L2 distance between two inputs' vectors) is
(epsilon, delta)-differentially private exactly if ``delta(sigma) <= delta``. Assumptions: the sensitivity is
enforced, here by clipping. Cost: none.
"""

from __future__ import annotations

import math

from aparte.errors import UserError


def delta_of(sigma: float, epsilon: float, sensitivity: float = 1.0) -> float:
    """The exact delta of Gaussian noise with deviation ``sigma`` at ``epsilon`` (theorem 8)."""
    shift, slope = sensitivity / (2 * sigma), epsilon * sigma / sensitivity
    return _normal_cdf(shift - slope) - math.exp(epsilon + _log_normal_cdf(-shift - slope))


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest deviation for (``epsilon``, ``delta``), by bisection to twelve digits."""
    if not (epsilon > 0 and math.isfinite(epsilon) and 0 < delta < 1 and sensitivity > 0):
        raise UserError("Noise needs an epsilon above 0, a delta between 0 and 1 and a sensitivity above 0.")
    low = high = 1.0
    while delta_of(high, epsilon) > delta:
        high *= 2
    while delta_of(low, epsilon) < delta:
        low /= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle, epsilon) <= delta else (middle, high)
    return high * sensitivity


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def _log_normal_cdf(value: float) -> float:
    """Also far out, where the value itself is no number any more."""
    if value > -30:
        return math.log(_normal_cdf(value))
    # Mills' ratio by its continued fraction, which converges at once out there.
    ratio = 0.0
    for term in range(20, 0, -1):
        ratio = term / (-value + ratio)
    return -0.5 * value * value - 0.5 * math.log(2 * math.pi) - math.log(-value + ratio)
