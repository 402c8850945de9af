"""What a defence is: something done on the device to what it sends, or to where the model is cut.

Defences that need training, pseudonyms and padding come in by the same door: they implement this protocol.
"""

from __future__ import annotations

from typing import Protocol

import torch

from aparte.config import Cut


class Defence(Protocol):
    """One setting of one defence. Everything random in it comes from the generator it is handed."""

    @property
    def name(self) -> str:
        """The kind, such as ``noise``."""
        ...

    @property
    def setting(self) -> str:
        """The kind with its parameters, as on the command line: ``noise:1000``."""
        ...

    @property
    def cancels(self) -> bool:
        """Whether the device takes what :meth:`protect` added out of what comes back."""
        ...

    def describe(self) -> str:
        """One sentence for the report, with the guarantee if there is one."""
        ...

    def cuts(self, cut: Cut) -> tuple[Cut, ...]:
        """The cuts among which each session draws one; just ``cut`` for most defences."""
        ...

    def calibrate(self, rows: torch.Tensor, first: torch.Tensor) -> None:
        """See undefended states of any text: ``rows`` ``[n, D]``, and ``first`` ``[m, D]`` of first tokens.

        Called once before anything is sent, at every cut anew.
        """
        ...

    def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:
        """What is sent instead of ``hidden`` ``[n, D]``, whose first row stands at ``position``."""
        ...

    def expected(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What :meth:`protect` sends on average for rows at ``positions`` ``[n]``: ``[n, D]``.

        Not for the device but for attackers, who know the defence and compare with what it would send.
        """
        ...

    def bytes_ratio(self, width: int, wire_bytes: int) -> float:
        """Bytes sent per token over those without the defence, which are ``wire_bytes``."""
        ...
