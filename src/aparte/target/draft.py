"""The draft target: the whole model behind a link verifies what this device drafts (SPADE, paper B).

Token ids go up, the model's choices come back, so the cloud **sees the text**. What the model chooses is what
it would have written alone, for a seed too, unless the drafts are judged by rejection sampling: then the
text is one of those that it might have written, with the same chances.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aparte.errors import FrameError
from aparte.model.parts import Blueprint
from aparte.step import Step
from aparte.target.base import Ask, Evaluation, Timing
from aparte.target.exchange import Exchange, message_of
from aparte.target.states import StateStore
from aparte.wire.blocks import Block, certain, judged, read_verdict, write_block
from aparte.wire.link import Link
from aparte.wire.tensors import TensorCodec


@dataclass(frozen=True)
class _Begun:
    """A block that is under way."""

    block: Block
    codec_ms: float


class DraftTarget:
    """Sends blocks of tokens, gets the verifier's choices."""

    name = "draft"
    rotary_switch = None

    def __init__(
        self,
        blueprint: Blueprint,
        link: Link,
        wire: str,
        *,
        rejection: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``blueprint`` is the verifier's model, of which only the configuration is used.

        ``wire`` is the number format of returned states; ``rejection`` the rule for drafts where tokens are
        sampled.
        """
        self.vocab_size = blueprint.vocab_size
        self.blueprint = blueprint
        self._link = link
        self._clock = clock
        self._codec = TensorCodec(wire, blueprint.hidden_size)
        self._exchange: Exchange[_Begun] = Exchange(link, clock)
        self._rejection = rejection
        self._layer = 0
        self._states: StateStore | None = None
        #: Bytes of returned states, out of :attr:`bytes_down`.
        self.bytes_states = 0

    @property
    def max_context(self) -> int:
        """The smaller one of the model's context, as far as it is uniform, and what the cloud allows."""
        return min(self.blueprint.uniform_context, self._link.max_context)

    @property
    def max_nodes(self) -> int:
        """What the cloud allows per step; known once the link is open."""
        return self._link.max_nodes

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

    @property
    def in_flight(self) -> bool:
        """Whether a step is under way that somebody waits for."""
        return bool(self._exchange)

    def keep_states(self, layer: int) -> StateStore:
        """From now on have the verifier return, for every token that becomes certain, the output of the first
        ``layer`` layers: the middle's in the store that this returns."""
        if self._states is None or layer != self._layer:
            self._layer = layer
            self._states = StateStore(self.blueprint.hidden_size, self.blueprint.precision)
        return self._states

    def open(self) -> bool:
        return self._exchange.open()

    def submit(self, step: Step, tokens: Sequence[int], ask: Ask) -> None:
        started = self._clock()
        spare = len(step) - len(ask.drawn)  # nodes before the drafted ones
        block = Block(
            tuple(tokens),
            ask.logits_from,
            ask.sampling,
            self._rejection,
            self._layer,
            tuple(ask.drawn[node - spare] for node in judged(step, ask.logits_from)) if ask.drawn else (),
            min(ask.likely, self.vocab_size),
        )
        if self._states is not None:
            self._states.expect(step)
        message = message_of(step, write_block(block))
        self._exchange.send(step, message, _Begun(block, (self._clock() - started) * 1e3))

    def collect(self) -> Evaluation:
        arrived = self._exchange.receive()
        step, block = arrived.step, arrived.note.block
        verdict = read_verdict(arrived.payload, step, block, self.vocab_size)
        choices, rest = verdict.choices, verdict.states
        if self._states is not None and block.layer == self._layer:
            nodes = certain(step, block, choices)
            self._states.put_middle_at(
                [step.slots[node] for node in nodes], self._codec.decode(rest, len(nodes))
            )
            self.bytes_states += len(rest)
        elif len(rest):
            raise FrameError(f"{self._link.where} sent more than it was asked for.")
        return Evaluation(
            torch.empty(0, self.vocab_size),
            Timing(
                codec_ms=arrived.note.codec_ms + (self._clock() - arrived.at) * 1e3,
                wait_ms=arrived.wait_ms,
                cloud_ms=arrived.cloud_ms,
                queue_ms=arrived.queue_ms,
                bytes_up=arrived.bytes_up,
                bytes_down=arrived.bytes_down,
            ),
            choices,
            verdict.likely,
        )

    def abandon(self) -> None:
        self._exchange.abandon()

    def reset(self) -> None:
        self._link.close()
        self._exchange.forget()

    def close(self) -> None:
        self.reset()
