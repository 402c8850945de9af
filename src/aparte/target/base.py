"""What the decoding loop knows of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from aparte.config import Sampling
from aparte.distribution import Distribution, Row
from aparte.step import Step


@dataclass(frozen=True)
class Ask:
    """What is wanted to know of a step's nodes.

    Nothing of those before node ``logits_from``. ``sampling`` and ``drawn`` matter where the target chooses
    tokens itself: how, and what the drafted nodes, the last ones of the step, were drawn from (empty if they
    were not drawn). So does ``likely``: it then names so many of the most probable tokens beside each choice.
    """

    logits_from: int
    sampling: Sampling = field(default_factory=Sampling)
    drawn: tuple[Distribution, ...] = ()
    likely: int = 0


@dataclass(frozen=True)
class Timing:
    """Where one step's time went, and what it sent. All times in milliseconds.

    ``device_ms`` is front, back and head; ``codec_ms`` turning tensors into frames and back;
    ``wait_ms`` the time from handing the message to the link until the whole answer is there;
    ``cloud_ms`` and ``queue_ms`` the cloud's own account of that wait: forward pass and waiting for it.
    """

    device_ms: float = 0.0
    codec_ms: float = 0.0
    wait_ms: float = 0.0
    cloud_ms: float = 0.0
    queue_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def rtt_ms(self) -> float:
        """The network's share: the wait without what the cloud says it spent."""
        return max(0.0, self.wait_ms - self.cloud_ms - self.queue_ms)

    def __add__(self, other: Timing) -> Timing:
        return Timing(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Evaluation:
    """Logits ``[rows, V]`` of the nodes that were asked for, in float32, and the step's timing.

    A target that chooses tokens itself gives no rows, but its ``choices``: the token after each of these
    nodes. -1 is a choice that it did not make, after a node that is not on the accepted path. ``likely`` has
    a row for each of these nodes if that was asked for.
    """

    logits: torch.Tensor
    timing: Timing = field(default_factory=Timing)
    choices: tuple[int, ...] | None = None
    likely: tuple[Row, ...] = ()


class Target(Protocol):
    """Gives logits for the nodes of a step. Steps are answered in the order of submission.

    Several may be under way at a time.
    """

    @property
    def name(self) -> str:
        """As in ``--target``."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens a sequence may have."""
        ...

    @property
    def rotary_switch(self) -> int | None:
        """The length beyond which a text begins anew, at this slot (:mod:`aparte.step`), if there is one."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of logits per node."""
        ...

    @property
    def max_nodes(self) -> int:
        """Most nodes per step."""
        ...

    @property
    def bytes_up(self) -> int:
        """Bytes of all steps sent since the beginning, stale ones included."""
        ...

    @property
    def bytes_down(self) -> int:
        """Bytes of all results that have been read since the beginning, stale ones included."""
        ...

    def open(self) -> bool:
        """Make sure the target can take steps. False if what it held is gone and must be sent again.

        After a :class:`~aparte.errors.LinkError` from :meth:`collect` this seeks the cloud again. If it is
        True then, every step that was not collected is still under way; if not, none is.

        Raises :class:`~aparte.errors.LinkError` and other connection errors.
        """
        ...

    def submit(self, step: Step, tokens: Sequence[int], ask: Ask) -> None:
        """Start a step."""
        ...

    def collect(self) -> Evaluation:
        """Wait for the oldest step that is not collected yet.

        A lost connection shows here, as a :class:`~aparte.errors.LinkError`, and never in :meth:`submit`.
        """
        ...

    def abandon(self) -> None:
        """Nobody will collect the steps under way; nothing more should be computed for them.

        The next step has a higher epoch than theirs, and writes over their slots.
        """
        ...

    def reset(self) -> None:
        """Forget all steps and caches, also those under way; the next :meth:`open` returns False."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
