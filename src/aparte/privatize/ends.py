"""Private ends: what a device adds to a public model's front and back, and nobody else has.

Two things. *Changes* of the weights of its own layers, of low rank or full, which training found. And a
*mask*, which is added to the front's output of every node before it is sent, and taken out of what comes
back: it replaces those coordinates of a state that the middle hardly reads by what a decoy, another token,
would have there. A middle of transformer layers carries what comes in through to its output, beside what it
computes from it, so that the mask can be taken out again; what remains is what the layers in between made
of it, and the coordinates are chosen so that this is little.

The decoy of a node is drawn from a secret key and all tokens up to the node (:mod:`aparte.privacy.paths`),
so that front and mask are one deterministic, secret function of the text. The first token of a text has no
mask: its state is outsized, and everything after it leans on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aparte.privacy.paths import Paths, gaussian
from aparte.step import Step

KEY_BYTES = 32


@dataclass(frozen=True)
class Change:
    """What is added to a weight ``[O, I]``: ``up [O, r] @ down [r, I]``, or ``up`` itself if full."""

    up: torch.Tensor
    down: torch.Tensor | None = None

    def delta(self) -> torch.Tensor:
        """``[O, I]``."""
        return self.up if self.down is None else self.up @ self.down


@dataclass(frozen=True)
class Veil:
    """Which ``n`` coordinates of a state are replaced, and by what.

    ``right [n, D]`` reads them off a state less ``centre [D]``, ``left [D, n]`` puts them in. ``table
    [m, n]`` has the mean values of ``m`` decoys, drawn with the chances ``shares [m]``, and ``spread [n, n]``
    turns standard normal numbers into what comes on top. With ``n`` of 0 nothing is replaced.
    """

    left: torch.Tensor
    right: torch.Tensor
    centre: torch.Tensor
    table: torch.Tensor
    shares: torch.Tensor
    spread: torch.Tensor

    @property
    def size(self) -> int:
        """The number of coordinates ``n``."""
        return len(self.right)

    def values(self, uniform: torch.Tensor, normal: torch.Tensor) -> torch.Tensor:
        """Decoys' coordinates ``[..., n]`` from random numbers ``[...]`` in (0, 1) and ``[..., n]``."""
        ends = self.shares.double().cumsum(0)
        chosen = torch.searchsorted(ends, uniform.double() * ends[-1]).clamp_max(len(ends) - 1)
        return self.table[chosen] + normal @ self.spread.T

    def mask(self, hidden: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What to add to states ``[..., D]`` so that they have these coordinates ``[..., n]``."""
        own = (hidden.float() - self.centre) @ self.right.T
        return (values - own) @ self.left.T

    def to(self, device: torch.device) -> Veil:
        """The same on a device."""
        return Veil(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class PrivateEnds:
    """The secret ``key``, the mask's ``veil``, and the ``changes`` by tensor name.

    ``settings`` are those of the training, and ``digest`` names the file.
    """

    key: bytes
    veil: Veil
    changes: Mapping[str, Change]
    settings: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""

    @property
    def setting(self) -> str:
        """The name by which audits of these ends are remembered."""
        return f"private-ends:{self.digest}"

    def change(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The device's own tensor in place of the public one."""
        change = self.changes.get(name)
        return weight if change is None else (weight.float() + change.delta()).to(weight.dtype)

    def new_mask(self) -> Mask:
        """A mask for one session."""
        return Mask(self.key, self.veil)


class Mask:
    """One session's masks, by the tokens on the path to each node."""

    def __init__(self, key: bytes, veil: Veil) -> None:
        self._paths = Paths(key)
        self._veil = veil

    def __call__(self, step: Step, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """What is added to ``hidden`` ``[n, D]``, the states of ``step``'s nodes, and later taken out."""
        digests, positions = self._paths.follow(step, tokens)
        rows = [
            # Row by row: a product of several rows may round differently from that of one.
            self._row(digest, row) if position else torch.zeros_like(row)
            for digest, position, row in zip(digests, positions, hidden.float().cpu(), strict=True)
        ]
        return torch.stack(rows)

    def _row(self, digest: bytes, hidden: torch.Tensor) -> torch.Tensor:
        return self._veil.mask(hidden, self._veil.values(*drawn(digest, self._veil.size)))


def drawn(digest: bytes, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A number in (0, 1) and ``size`` standard normal ones that belong to a path."""
    numbers = gaussian(digest, size + 1)
    return torch.special.ndtr(numbers[0]), numbers[1:].float()
