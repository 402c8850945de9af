"""The split target: front and back on this device, the middle behind a link (paper A, section 4.1)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aparte.config import Cut
from aparte.errors import LinkError
from aparte.model.parts import Blueprint, Progress
from aparte.step import Step
from aparte.target.base import Evaluation, Timing
from aparte.target.states import StateStore
from aparte.wire.frames import ResultFrame, StepFrame, encode
from aparte.wire.link import Link
from aparte.wire.tensors import TensorCodec


@dataclass
class _Pending:
    """A step that was sent and is not collected."""

    step: Step
    logits_from: int
    device_ms: float
    codec_ms: float
    sent_at: float
    bytes_up: int


class DeviceParts:
    """Front and back of a model: what the trusted device holds."""

    def __init__(self, blueprint: Blueprint, cut: Cut, progress: Progress | None = None) -> None:
        middle = cut.middle(blueprint.layers)
        self.blueprint = blueprint
        self.cut = cut
        self.hidden_size = blueprint.hidden_size
        self.vocab_size = blueprint.vocab_size
        self.max_context = blueprint.max_context
        self.precision = blueprint.precision
        self.embed, self.head = blueprint.ends()
        self.front = blueprint.stage(range(middle.start), progress, "front layers")
        self.back = blueprint.stage(range(middle.stop, blueprint.layers), progress, "back layers")


class SplitTarget:
    """Sends the front's hidden states, gets the middle's back, and turns those into logits."""

    def __init__(
        self,
        parts: DeviceParts,
        link: Link,
        wire: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock`` gives the seconds that steps are timed by."""
        self.parts = parts
        self._link = link
        self._clock = clock
        self._codec = TensorCodec(wire, parts.hidden_size)
        self._front_cache = parts.front.new_cache()
        self._back_cache = parts.back.new_cache()
        self._pending: deque[_Pending] = deque()
        self._stale: deque[int] = deque()  # numbers of abandoned steps that the cloud may yet answer
        self.bytes_up = 0
        self.bytes_down = 0
        self._states: StateStore | None = None
        self.vocab_size = parts.vocab_size

    @property
    def max_context(self) -> int:
        """The smaller one of the model's context and what the cloud allows."""
        return min(self.parts.max_context, self._link.max_context)

    @property
    def max_nodes(self) -> int:
        """What the cloud allows per step; known once the link is open."""
        return self._link.max_nodes

    def open(self) -> bool:
        kept = self._link.open()
        if not kept:
            self._forget()
        return kept

    def submit(self, step: Step, tokens: Sequence[int], logits_from: int) -> None:
        started = self._clock()
        hidden = self.parts.front.forward(self._front_cache, step, self.parts.embed(torch.tensor(tokens)))
        if self._states is not None:
            self._states.put_front(step, hidden)
        computed = self._clock()
        message = encode(StepFrame(step, self._codec.encode(hidden)))
        encoded = self._clock()  # the wait includes handing the message over
        self._link.send(message)
        self.bytes_up += len(message)
        self._pending.append(
            _Pending(
                step,
                logits_from,
                device_ms=(computed - started) * 1e3,
                codec_ms=(encoded - computed) * 1e3,
                sent_at=encoded,
                bytes_up=len(message),
            )
        )

    def collect(self) -> Evaluation:
        pending, frame, size = self._receive()
        received = self._clock()
        hidden = self._codec.decode(frame.payload, len(pending.step))
        decoded = self._clock()
        if self._states is not None:
            self._states.put_middle(pending.step, hidden)
        output = self.parts.back.forward(self._back_cache, pending.step, hidden)
        logits = self.parts.head(output[pending.logits_from :])
        ended = self._clock()
        return Evaluation(
            logits,
            Timing(
                device_ms=pending.device_ms + (ended - decoded) * 1e3,
                codec_ms=pending.codec_ms + (decoded - received) * 1e3,
                wait_ms=(received - pending.sent_at) * 1e3,
                cloud_ms=frame.compute_ms,
                queue_ms=frame.queue_ms,
                bytes_up=pending.bytes_up,
                bytes_down=size,
            ),
        )

    def _receive(self) -> tuple[_Pending, ResultFrame, int]:
        """The oldest step under way, its result and that message's size.

        Results of stale steps are skipped: the cloud answers those that it began before it knew, in order.
        The back never sees them.
        """
        pending = self._pending.popleft()
        while True:
            frame, size = self._link.receive()
            self.bytes_down += size
            number = frame.number if isinstance(frame, ResultFrame) else None
            if number not in self._stale:
                break
            while self._stale.popleft() != number:
                pass
        self._stale.clear()  # the cloud dropped what it did not answer
        if not isinstance(frame, ResultFrame) or number != pending.step.number:
            raise LinkError(
                f"{self._link.where} answered something else than step {pending.step.number}. "
                "Is it the same version of aparte?"
            )
        return pending, frame, size

    def abandon(self) -> None:
        self._stale.extend(pending.step.number for pending in self._pending)
        self._pending.clear()

    def keep_states(self) -> StateStore:
        """From now on keep the hidden states that pass by, for a drafter that starts from them."""
        if self._states is None:
            self._states = StateStore(self.parts.hidden_size, self.parts.precision)
        return self._states

    @property
    def in_flight(self) -> bool:
        """Whether a step is under way that somebody waits for."""
        return bool(self._pending)

    def draft_front(self, step: Step, tokens: Sequence[int]) -> torch.Tensor:
        """The front's output ``[n, D]`` for nodes that are not sent.

        The slots have to be above everything under way; the next step that is submitted forgets them.
        """
        return self.parts.front.forward(self._front_cache, step, self.parts.embed(torch.tensor(tokens)))

    def draft_back(self, step: Step, middle: torch.Tensor) -> torch.Tensor:
        """The back's output ``[n, D]``, before the head, for such nodes, from a guess of the middle's."""
        return self.parts.back.forward(self._back_cache, step, middle)

    def reset(self) -> None:
        self._link.close()
        self._forget()

    def close(self) -> None:
        self.reset()

    def _forget(self) -> None:
        self._pending.clear()
        self._stale.clear()
        self._front_cache = self.parts.front.new_cache()
        self._back_cache = self.parts.back.new_cache()
