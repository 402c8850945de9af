"""What may be done to a split target's steps on their way out: by settings, not by the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from aparte.step import Step


class Guard(Protocol):
    """Changes what is sent for each node."""

    def __call__(self, step: Step, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """What to send instead of ``hidden`` ``[n, D]``: the same for the same tokens, in whatever step."""
        ...


class Mask(Protocol):
    """Numbers that are added to what is sent for each node, and taken out of what comes back for it."""

    def __call__(self, step: Step, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """The masks ``[n, D]`` in float32 of states ``hidden``: the same for the same tokens, in whatever
        step."""
        ...


class Shape(Protocol):
    """Decides how messages look from outside: their size and their time."""

    @property
    def nodes(self) -> int:
        """Nodes of every step."""
        ...

    def begin(self) -> None:
        """An answer begins; what went before says nothing of the times to come."""
        ...

    def fill(self, step: Step, tokens: Sequence[int]) -> tuple[Step, Sequence[int]]:
        """The step with further nodes behind its own. Nobody wants to know anything of those."""
        ...

    def seal(self, message: bytes) -> bytes:
        """The step's message, in its final size."""
        ...

    def wait(self) -> None:
        """Return when it is time to send."""
        ...
