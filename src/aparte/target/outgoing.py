"""What may be done to a split target's steps on their way out, and who watches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aparte.step import Step
from aparte.wire.tensors import TensorCodec


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


@dataclass(frozen=True)
class Sent:
    """What one message showed the cloud: ``norms`` are the lengths of its hidden states as the cloud reads
    them, in the order of the nodes, fillers of a constant shape included. ``sample`` is the beginning of its
    last state, byte by byte."""

    norms: tuple[float, ...]
    width: int
    wire: str
    bytes_up: int
    sample: bytes

    @classmethod
    def of(cls, message: bytes, payload: bytes | memoryview, nodes: int, codec: TensorCodec) -> Sent:
        """Of a ``message`` with the states of so many ``nodes`` as its ``payload``."""
        norms = codec.decode(payload, nodes).float().norm(dim=-1)
        last = bytes(payload[(nodes - 1) * codec.bytes_per_node :][:SAMPLE_BYTES])
        return cls(tuple(norms.tolist()), codec.width, codec.wire, len(message), last)


#: Bytes of a state that are shown as they are.
SAMPLE_BYTES = 24


class Witness(Protocol):
    """Is told of every message on its way out. It stays on this device."""

    def __call__(self, sent: Sent, /) -> None: ...
