"""Defences that need no training: nothing, coarser numbers, calibrated noise, a cut drawn at random.

Sources: paper A (arXiv 2602.16760) suggests depth, int8, noise and a random cut without testing them;
SnD-style noise is measured in arXiv 2503.09291. Assumptions: each is known to the attacker in full, who
trains on text that went through it. Cost: what :mod:`aparte.privacy.price` measures.

Depth is not here: it is the cut itself, and an audit takes several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from aparte.config import Cut
from aparte.errors import UserError
from aparte.privacy.defence import Defence
from aparte.privacy.noise import gaussian_sigma

#: The chance that the guarantee of a noise setting does not hold, per row.
DELTA = 1e-5
#: Share of rows that are not clipped; more would need more noise for the sake of a few outliers.
CLIP = 0.9
KNOWN = "none, int8 down to int2, noise:EPSILON, random-cut:LOW-HIGH, private-ends=FILE"


@dataclass
class Nothing:
    """No defence: the layer's output in the wire's number format."""

    @property
    def name(self) -> str:
        return "none"

    @property
    def setting(self) -> str:
        return self.name

    @property
    def cancels(self) -> bool:
        return False

    def describe(self) -> str:
        return "Nothing is done to what is sent."

    def cuts(self, cut: Cut) -> tuple[Cut, ...]:
        return (cut,)

    def calibrate(self, rows: torch.Tensor, first: torch.Tensor) -> None:
        pass

    def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG002
        return hidden

    def expected(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return hidden

    def bytes_ratio(self, width: int, wire_bytes: int) -> float:  # noqa: ARG002
        return 1.0


@dataclass
class Quantised(Nothing):
    """Integers of ``bits`` bits with one scale per token, symmetric around zero."""

    bits: int = 8

    @property
    def name(self) -> str:
        return "quantised"

    @property
    def setting(self) -> str:
        return f"int{self.bits}"

    def describe(self) -> str:
        return f"Each token's numbers are rounded to integers of {self.bits} bits with a scale of their own."

    def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG002
        top = 2 ** (self.bits - 1) - 1
        scale = hidden.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / top
        rounded: torch.Tensor = (hidden / scale).round() * scale
        return rounded

    def expected(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self.protect(hidden, 0, torch.Generator())

    def bytes_ratio(self, width: int, wire_bytes: int) -> float:
        return (width * self.bits / 8 + 2) / wire_bytes


@dataclass
class Noise(Nothing):
    """Gaussian noise for a stated (epsilon, delta) per row, after clipping the row's length.

    The guarantee: from one row alone, any two inputs are told apart no better than (epsilon, delta)
    allows. Rows of a text add up: ``n`` rows that depend on the same word have roughly ``sqrt(n)`` to ``n``
    times the epsilon. Lengths are clipped where nine of ten rows of the calibration text are shorter, with a
    bound of its own for the first token, whose state is often a hundred times longer than all others.
    """

    epsilon: float = 1000.0
    delta: float = DELTA
    _bounds: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False)

    @property
    def name(self) -> str:
        return "noise"

    @property
    def setting(self) -> str:
        return f"noise:{self.epsilon:g}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Lengths at which the first token's row and all others are clipped; known after calibration."""
        return self._bounds

    def describe(self) -> str:
        first, rest = self._bounds
        return (
            f"Gaussian noise, epsilon {self.epsilon:g} and delta {self.delta:g} per token's row, by the "
            f"analytic Gaussian mechanism. Rows are clipped to length {rest:.4g} (the first token's to "
            f"{first:.4g}), so the sensitivity is twice that, and the noise has a deviation "
            f"of {self.sigma(1):.4g} per number. "
            "An epsilon above about 10 is no protection in the sense of differential privacy."
        )

    def sigma(self, position: int) -> float:
        """Deviation of the noise on each number of the row at ``position``."""
        return gaussian_sigma(self.epsilon, self.delta, 2 * self._bounds[position > 0])

    def calibrate(self, rows: torch.Tensor, first: torch.Tensor) -> None:
        lengths = [part.float().norm(dim=1).quantile(CLIP) for part in (first, rows)]
        self._bounds = (float(lengths[0]), float(lengths[1]))

    def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:
        places = torch.arange(position, position + len(hidden))
        sigmas = torch.where(places > 0, self.sigma(1), self.sigma(0))[:, None]
        noise = torch.randn(hidden.shape, generator=generator) * sigmas
        sent: torch.Tensor = self.expected(hidden, places) + noise.to(hidden.device, hidden.dtype)
        return sent

    def expected(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The clipped rows."""
        limits = torch.where(positions > 0, self._bounds[1], self._bounds[0])[:, None].to(hidden.device)
        lengths = hidden.float().norm(dim=1, keepdim=True).clamp_min(1e-12)
        clipped: torch.Tensor = hidden * (limits / lengths).clamp(max=1.0).to(hidden.dtype)
        return clipped


@dataclass
class RandomCut(Nothing):
    """Every session draws how many layers come before the middle; the back stays as it is."""

    low: int = 2
    high: int = 8

    @property
    def name(self) -> str:
        return "random-cut"

    @property
    def setting(self) -> str:
        return f"random-cut:{self.low}-{self.high}"

    def describe(self) -> str:
        return (
            f"Every session draws its first cloud layer from {self.low} to {self.high}. The cloud has to "
            "host all of them and be told which; here the attacker is not told and has to find out."
        )

    def cuts(self, cut: Cut) -> tuple[Cut, ...]:
        return tuple(Cut(front, cut.back) for front in range(self.low, self.high + 1))


def parse_defence(text: str) -> Defence:
    """Read one setting. Raises :class:`UserError` for an unknown one."""
    if text.strip().startswith("private-ends="):
        from aparte.privacy.private_ends import PREFIX, PrivateEndsDefence

        return PrivateEndsDefence(Path(text.strip().removeprefix(PREFIX)))
    name, _, value = text.strip().partition(":")
    try:
        if name == "none" and not value:
            return Nothing()
        if name.startswith("int") and not value and 2 <= int(name[3:]) <= 8:
            return Quantised(int(name[3:]))
        if name == "noise" and float(value) > 0:
            return Noise(float(value))
        if name == "random-cut":
            low, high = (int(part) for part in value.split("-"))
            if 1 <= low < high:
                return RandomCut(low, high)
    except ValueError:
        pass
    raise UserError(f"Unknown defence {text.strip()!r}. Known: {KNOWN}.")


class Pinned:
    """A defence at one of its cuts: what an attacker sets up who tries the cuts one by one."""

    def __init__(self, defence: Defence, cut: Cut) -> None:
        self._defence = defence
        self._cut = cut

    @property
    def name(self) -> str:
        return self._defence.name

    @property
    def setting(self) -> str:
        return self._defence.setting

    @property
    def cancels(self) -> bool:
        return self._defence.cancels

    def describe(self) -> str:
        return self._defence.describe()

    def cuts(self, cut: Cut) -> tuple[Cut, ...]:  # noqa: ARG002
        return (self._cut,)

    def calibrate(self, rows: torch.Tensor, first: torch.Tensor) -> None:
        self._defence.calibrate(rows, first)

    def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:
        return self._defence.protect(hidden, position, generator)

    def expected(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._defence.expected(hidden, positions)

    def bytes_ratio(self, width: int, wire_bytes: int) -> float:
        return self._defence.bytes_ratio(width, wire_bytes)
