"""What a forward pass costs, learned from the passes so far, and how many nodes one should have."""

from __future__ import annotations

#: How much an observation still counts after the next one.
MEMORY = 0.97
#: A full pass takes about so many times as long as one without nodes. That fixed time is what sharing saves;
#: in a pass of this size it is a tenth of the whole, and more nodes would only make everybody wait.
STRETCH = 10.0
#: A piece of a prompt makes the pass that it joins so many times as long as one without nodes, so that
#: whoever comes meanwhile waits little longer than for any other pass. More pieces cost nobody much in
#: company: there is a next pass for the others anyway.
PIECE_STRETCH = 2.0
#: Most nodes of a pass before anything is known, and the bounds of what is believed.
DEFAULT_NODES = 64
LEAST_NODES, MOST_NODES = 16, 2048


class PassCost:
    """Fits the time of a pass as ``fixed + nodes x each``, by least squares with fading memory."""

    def __init__(self) -> None:
        self._one = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums

    def observe(self, nodes: int, pass_ms: float) -> None:
        """A pass over ``nodes`` nodes took ``pass_ms``."""
        # Relative errors count: a long pass that took 10 % longer says no more than a short one.
        weight = 1.0 / max(pass_ms, 1e-3) ** 2
        self._one = MEMORY * self._one + weight
        self._x = MEMORY * self._x + weight * nodes
        self._y = MEMORY * self._y + weight * pass_ms
        self._xx = MEMORY * self._xx + weight * nodes * nodes
        self._xy = MEMORY * self._xy + weight * nodes * pass_ms

    @property
    def fit_ms(self) -> tuple[float, float] | None:
        """``fixed`` and ``each``; None while passes of about one size say nothing about others."""
        spread = self._one * self._xx - self._x**2
        if spread <= 0.05 * self._one * self._xx:
            return None
        each = max(0.0, (self._one * self._xy - self._x * self._y) / spread)
        return max(0.0, (self._y - each * self._x) / self._one), each

    @property
    def full(self) -> int:
        """Most nodes that a shared pass should have."""
        if self.fit_ms is None:
            return DEFAULT_NODES
        return self._within(STRETCH, LEAST_NODES)

    @property
    def piece(self) -> int:
        """Most nodes of a prompt in a shared pass."""
        if self.fit_ms is None:
            return DEFAULT_NODES // 2
        return min(self._within(PIECE_STRETCH, LEAST_NODES // 2), self.full // 2)

    def _within(self, stretch: float, least: int) -> int:
        """Nodes with which a pass takes ``stretch`` times as long as without."""
        assert self.fit_ms is not None
        fixed, each = self.fit_ms
        wanted = (stretch - 1) * fixed / each if each > 0 else MOST_NODES
        return int(min(max(least, wanted), MOST_NODES))
