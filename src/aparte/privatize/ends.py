"""Private ends: what a device adds to a public model's front and back, and nobody else has.

Two things. *Changes* of the weights of its own layers, of low rank or full, which training found. And a
*mask*: numbers added to the front's output of every node before it is sent, and taken out of what comes back.
A middle of transformer layers carries what comes in through to its output, beside what it computes from it, so
that the mask can be taken out there again; what remains is what the layers in between made of it, and the
mask's shape is chosen so that this is little. The mask of a node is drawn from a secret key and all tokens up
to the node (:mod:`aparte.privacy.paths`), so front and mask are one deterministic, secret function of the text.
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
class PrivateEnds:
    """``shape`` ``[D, D]`` turns standard normal numbers into a mask; ``changes`` go by tensor name.

    ``settings`` are those of the training, and ``digest`` names the file.
    """

    key: bytes
    shape: torch.Tensor
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
        return Mask(self.key, self.shape)


class Mask:
    """One session's masks, by the tokens on the path to each node."""

    def __init__(self, key: bytes, shape: torch.Tensor) -> None:
        self._paths = Paths(key)
        self._shape = shape.float()

    def __call__(self, step: Step, tokens: Sequence[int]) -> torch.Tensor:
        """What is added for the nodes of ``step``, and later taken out: ``[n, D]`` in float32."""
        digests, _ = self._paths.follow(step, tokens)
        width = len(self._shape)
        normal = torch.stack([gaussian(digest, width) for digest in digests]).float()
        # Row by row: a product of several rows may round differently from that of one.
        return torch.stack([self._shape @ row for row in normal])
