"""The split target: front and back on this device, the middle behind a link (paper A, section 4.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aparte.config import Cut
from aparte.errors import UserError
from aparte.model.parts import Blueprint, Progress
from aparte.step import Step
from aparte.target.base import Ask, Evaluation, Timing
from aparte.target.exchange import Exchange, message_of
from aparte.target.outgoing import Guard, Mask, Sent, Shape, Witness
from aparte.target.states import StateStore
from aparte.wire.link import Link
from aparte.wire.tensors import TensorCodec


@dataclass(frozen=True)
class _Begun:
    """What the device did for a step that is under way, whose first ``nodes`` nodes were asked for.

    ``mask`` ``[n, D]`` is what was added to its states, if anything.
    """

    nodes: int
    logits_from: int
    device_ms: float
    codec_ms: float
    mask: torch.Tensor | None


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

    name = "split"

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
        self._exchange: Exchange[_Begun] = Exchange(link, clock)
        self._states: StateStore | None = None
        self._guard: Guard | None = None
        self._shape: Shape | None = None
        self._mask: Mask | None = None
        self._witness: Witness | None = None
        self.vocab_size = parts.vocab_size

    def protect(self, guard: Guard | None = None, shape: Shape | None = None) -> None:
        """From now on send what ``guard`` makes of the front's output, and steps of this ``shape``."""
        self._guard, self._shape = guard, shape

    def hide(self, mask: Mask) -> None:
        """From now on add ``mask`` to what is sent, before any guard, and take it out of what comes back."""
        self._mask = mask

    def watch(self, witness: Witness) -> None:
        """From now on tell ``witness`` of everything that is sent."""
        self._witness = witness

    @property
    def shape(self) -> Shape | None:
        """The shape of the steps, if they have one."""
        return self._shape

    @property
    def blueprint(self) -> Blueprint:
        """The model's."""
        return self.parts.blueprint

    @property
    def max_context(self) -> int:
        """The smaller one of the model's context and what the cloud allows."""
        blueprint = self.parts.blueprint
        own = blueprint.max_context if self._shape is None else blueprint.uniform_context
        return min(own, self._link.max_context)

    @property
    def rotary_switch(self) -> int | None:
        """None for a shape: its filling does not know where to end, so the context ends there."""
        return self.parts.blueprint.rotary_switch if self._shape is None else None

    @property
    def max_nodes(self) -> int:
        """What the cloud allows per step, known once the link is open, and the shape has room for."""
        most = self._link.max_nodes
        return most if self._shape is None else min(most, self._shape.nodes)

    @property
    def where(self) -> str:
        """The cloud in use, for messages."""
        return self._link.where

    @property
    def bytes_up(self) -> int:
        return self._exchange.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._exchange.bytes_down

    def open(self) -> bool:
        kept = self._exchange.open()
        if not kept:
            self._forget()
        if self._shape is not None:
            if self._shape.nodes > self._link.max_nodes:
                raise UserError(
                    f"Steps of {self._shape.nodes} nodes are wanted, and this cloud takes "
                    f"{self._link.max_nodes} at most. Choose a smaller --constant-shape."
                )
            self._shape.begin()
        return kept

    def submit(self, step: Step, tokens: Sequence[int], ask: Ask) -> None:
        started, nodes = self._clock(), len(step)
        if self._shape is not None:
            step, tokens = self._shape.fill(step, tokens)
        hidden = self.parts.front.forward(self._front_cache, step, self.parts.embed(torch.tensor(tokens)))
        if self._states is not None:
            self._states.put_front(step, hidden)
        computed = self._clock()
        mask, sent = None, hidden
        if self._mask is not None:
            mask = self._mask(step, tokens, hidden).to(hidden.device)
            sent = (hidden.float() + mask).to(hidden.dtype)
        if self._guard is not None:
            sent = self._guard(step, tokens, sent)
        payload = self._codec.encode(sent)
        message = message_of(step, payload)
        if self._shape is not None:
            message = self._shape.seal(message)
        if self._witness is not None:
            self._witness(Sent.of(message, payload, len(step), self._codec))
        encoded = self._clock()
        begun = _Begun(
            nodes,
            ask.logits_from,
            device_ms=(computed - started) * 1e3,
            codec_ms=(encoded - computed) * 1e3,
            mask=mask,
        )
        if self._shape is not None:
            self._shape.wait()
        self._exchange.send(step, message, begun)

    def collect(self) -> Evaluation:
        arrived = self._exchange.receive()  # the back never sees a stale step
        step, begun = arrived.step, arrived.note
        hidden = self._codec.decode(arrived.payload, len(step))
        if begun.mask is not None:
            hidden = (hidden.to(begun.mask.device).float() - begun.mask).to(self.parts.precision.dtype)
        decoded = self._clock()
        if self._states is not None:
            self._states.put_middle(step, hidden)
        output = self.parts.back.forward(self._back_cache, step, hidden)
        logits = self.parts.head(output[begun.logits_from : begun.nodes])
        ended = self._clock()
        return Evaluation(
            logits,
            Timing(
                device_ms=begun.device_ms + (ended - decoded) * 1e3,
                codec_ms=begun.codec_ms + (decoded - arrived.at) * 1e3,
                wait_ms=arrived.wait_ms,
                cloud_ms=arrived.cloud_ms,
                queue_ms=arrived.queue_ms,
                bytes_up=arrived.bytes_up,
                bytes_down=arrived.bytes_down,
            ),
        )

    def abandon(self) -> None:
        self._exchange.abandon()

    def keep_states(self) -> StateStore:
        """From now on keep the hidden states that pass by, for a drafter that starts from them."""
        if self._states is None:
            self._states = StateStore(self.parts.hidden_size, self.parts.precision)
        return self._states

    @property
    def in_flight(self) -> bool:
        """Whether a step is under way that somebody waits for."""
        return bool(self._exchange)

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
        self._exchange.forget()
        self._front_cache = self.parts.front.new_cache()
        self._back_cache = self.parts.back.new_cache()
