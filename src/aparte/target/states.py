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
        self._returned: set[int] = set()  # slots whose middle output is there

    def expect(self, step: Step) -> None:
        """A step was sent: what its slots, and those after them, held is of another tree."""
        self._returned = {slot for slot in self._returned if slot < step.base}

    def returned(self, slots: Sequence[int]) -> int:
        """How many of these slots, from the first on, have the middle's output for what they hold."""
        missing = (place for place, slot in enumerate(slots) if slot not in self._returned)
        return next(missing, len(slots))

    def put_front(self, step: Step, hidden: torch.Tensor) -> None:
        """The front's output ``[n, D]`` of the step's nodes."""
        self._front = _grown(self._front, step.slots.stop)
        self._front[step.slots.start : step.slots.stop] = hidden

    def put_middle(self, step: Step, hidden: torch.Tensor) -> None:
        """The middle's output ``[n, D]`` of the step's nodes."""
        self.put_middle_at(step.slots, hidden)

    def put_middle_at(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        """The middle's output ``[n, D]`` of the nodes in ``slots``, in increasing order."""
        if slots:
            self._middle = _grown(self._middle, slots[-1] + 1)
            self._middle[list(slots)] = hidden.to(self._middle)
            self._returned.update(slots)

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
