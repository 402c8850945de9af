"""What the device knows of its own split: the front's and the middle's output of every node.

The front's rows are there when a step is sent, the middle's when it is back. A trained drafter (the
*bridge*) starts from them; nothing here leaves the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aparte.model.parts import Precision
from aparte.step import Step

#: Rows allocated at first; the buffers double from there.
FIRST_ROWS = 256


class StateStore:
    """Hidden states by slot. A slot that is written again holds what was written last."""

    def __init__(self, width: int, precision: Precision) -> None:
        """``width`` is the model's hidden size ``D``."""
        self._front = torch.zeros(0, width, dtype=precision.dtype, device=precision.device)
        self._middle = torch.zeros_like(self._front)

    def put_front(self, step: Step, hidden: torch.Tensor) -> None:
        """The front's output ``[n, D]`` of the step's nodes."""
        self._front = _grown(self._front, step.slots.stop)
        self._front[step.slots.start : step.slots.stop] = hidden

    def put_middle(self, step: Step, hidden: torch.Tensor) -> None:
        """The middle's output ``[n, D]`` of the step's nodes."""
        self._middle = _grown(self._middle, step.slots.stop)
        self._middle[step.slots.start : step.slots.stop] = hidden

    def front(self, slots: Sequence[int]) -> torch.Tensor:
        """``[n, D]``, a copy."""
        return self._front[list(slots)]

    def middle(self, slots: Sequence[int]) -> torch.Tensor:
        """``[n, D]``, a copy."""
        return self._middle[list(slots)]


def _grown(buffer: torch.Tensor, rows: int) -> torch.Tensor:
    if rows <= len(buffer):
        return buffer
    bigger = buffer.new_zeros(max(rows, FIRST_ROWS, 2 * len(buffer)), buffer.shape[1])
    bigger[: len(buffer)] = buffer
    return bigger
