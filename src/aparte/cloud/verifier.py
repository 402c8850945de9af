"""The verifier: the whole model on the cloud, for draft mode (SPADE, paper B).

Here tokens come in and tokens go out: **this side sees the text**. It is the only module of the cloud that
does, and only ``aparte serve --whole`` imports it. It needs no tokenizer.

The device drafts, this side decides. Every node of a step gets the model's own *choice* of the token after
it; the device follows the choices through its tree, as it does with those that it makes itself in split mode.
"""

from __future__ import annotations

import torch

from aparte.cloud.engine import Engine
from aparte.cloud.sessions import Session
from aparte.config import Sampling, ServerLimits
from aparte.distribution import Row
from aparte.errors import FrameError, WireOverflowError
from aparte.fingerprint import Fingerprint
from aparte.likely import likely
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint, Embedding, Head, Progress
from aparte.model.slab import Slab
from aparte.model.stage import Stage
from aparte.rejection import UNDECIDED, Noise, judge
from aparte.sampling import choose, process
from aparte.step import Step
from aparte.wire.blocks import (
    HEAD_BYTES,
    NODE_BYTES,
    Block,
    Verdict,
    certain,
    check_block,
    judged,
    read_block,
    write_block,
    write_verdict,
)
from aparte.wire.tensors import TensorCodec

#: Rows of logits that are there at a time: with a large vocabulary they are what takes memory.
ROWS = 64


def _named(logits: torch.Tensor, block: Block) -> list[list[tuple[int, float]]]:
    """What a verdict names beside the choices of these rows."""
    return likely(logits, block.likely) if block.likely else []


class VerifierSession(Session):
    """Blocks of tokens in, the model's choices out, and hidden states where they are wanted."""

    def __init__(
        self,
        stage: Stage,
        embed: Embedding,
        head: Head,
        vocab_size: int,
        codec: TensorCodec,
        limits: ServerLimits,
        slab: Slab,
    ) -> None:
        super().__init__(stage, limits, slab)
        self._embed = embed
        self._head = head
        self._vocab_size = vocab_size
        self._codec = codec
        self._block: Block | None = None  # of the step that is being computed

    def check_payload(self, step: Step, payload: bytes | memoryview) -> None:
        check_block(payload, step)

    def read(self, step: Step, payload: bytes | memoryview) -> torch.Tensor:
        block = read_block(payload, step)
        layers = len(self.stage.layer_indices)
        if block.layer > layers:
            raise FrameError(f"A block asks for the output of layer {block.layer}; this model has {layers}.")
        if block.likely > self._vocab_size:
            raise FrameError(
                f"A block asks for {block.likely} tokens where the model has {self._vocab_size}."
            )
        named = max((token for one in block.drawn for token in one.tokens), default=0)
        if max(*block.tokens, named) >= self._vocab_size:
            raise FrameError(
                f"A block holds a token id that this model does not have: it has {self._vocab_size} tokens."
            )
        self._block = block
        self.tap = block.layer - 1 if block.layer else None
        return self._embed(torch.tensor(block.tokens))

    def finish(self, step: Step, hidden: torch.Tensor, tapped: torch.Tensor | None) -> memoryview:
        block, self._block = self._block, None
        assert block is not None, "read() comes first"
        choices: list[int] = []
        named: list[Row] = []
        if block.choose_from < len(step):
            # The token after a node is that of the next position.
            slots = step.slots[block.choose_from :]
            positions = [position + 1 for position in self.cache.tree.positions(slots)]
            if block.rejection:
                choices, named = self._judge(step, block, hidden, positions)
            else:
                choices, named = self._choose(block, hidden, positions)
        states = b"" if tapped is None else self._codec.encode(tapped[list(certain(step, block, choices))])
        return memoryview(write_verdict(Verdict(tuple(choices), tuple(named), states)))

    def _choose(
        self, block: Block, hidden: torch.Tensor, positions: list[int]
    ) -> tuple[list[int], list[Row]]:
        """Greedy or coupled: by logits, seed and position alone."""
        choices: list[int] = []
        named: list[Row] = []
        for start in range(0, len(positions), ROWS):
            part = positions[start : start + ROWS]
            first = block.choose_from + start
            logits = self._logits(hidden[first : first + len(part)])
            choices += choose(logits, part, block.sampling)
            named += _named(logits, block)
        return choices, named

    def _judge(
        self, step: Step, block: Block, hidden: torch.Tensor, positions: list[int]
    ) -> tuple[list[int], list[Row]]:
        """Rejection sampling below each root, whichever of them the step before turns out to have chosen."""
        first = block.choose_from
        sources = dict(zip(judged(step, first), block.drawn, strict=False))
        root_of: dict[int, int] = {}
        trees: dict[int, list[int]] = {}  # drafts by root, parents before children
        for node in range(first, len(step)):
            parent = step.parents[node] - step.base
            root = root_of[node] = root_of[parent] if parent >= first else node
            trees.setdefault(root, []).extend([node] if parent >= first else [])
        choices = [UNDECIDED] * len(positions)
        named: list[Row] = [()] * len(positions) if block.likely else []
        for root, drafts in trees.items():
            place = {root: -1, **{node: index for index, node in enumerate(drafts)}}
            nodes = [root, *drafts]
            logits = self._logits(hidden[nodes])
            p = process(logits, block.sampling).softmax(dim=-1)
            try:
                decided = judge(
                    [place[step.parents[node] - step.base] for node in drafts],
                    [block.tokens[node] for node in drafts],
                    [sources[node] for node in drafts] if block.drawn else (),
                    p,
                    Noise(block.sampling.seed, positions[root - first]),
                )
            except ValueError as error:
                raise FrameError(str(error)) from None
            for node, choice in zip(nodes, decided, strict=True):
                choices[node - first] = choice
            for node, row in zip(nodes, _named(logits, block), strict=False):
                named[node - first] = row
        return choices, named

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, D] -> [n, V]``. Raises :class:`WireOverflowError` rather than choose by what is no number."""
        logits = self._head(hidden)
        # Their sum tells, twenty times as fast, unless it is too large for its format itself.
        if not bool(torch.isfinite(logits.sum())) and not bool(torch.isfinite(logits).all()):
            raise WireOverflowError(
                "The model's logits are not finite numbers. With --dtype float16 use bfloat16 or float32; "
                "otherwise the checkpoint is damaged."
            )
        return logits


class Verifier(Engine):
    """The served model in one piece; opens sessions and computes for them."""

    def __init__(
        self,
        stage: Stage,
        embed: Embedding,
        head: Head,
        vocab_size: int,
        fingerprint: Fingerprint,
        width: int,
        limits: ServerLimits | None = None,
        dtype: str = "",
    ) -> None:
        super().__init__(stage, fingerprint, width, limits, dtype)
        self._embed = embed
        self._head = head
        self._vocab_size = vocab_size

    @property
    def max_message_bytes(self) -> int:
        return self.limits.max_nodes_per_step * NODE_BYTES + HEAD_BYTES + self.limits.header_bytes

    def new_session(self, stage: Stage, wire: str) -> VerifierSession:
        codec = TensorCodec(wire, self._width)
        ends = (self._embed, self._head, self._vocab_size)
        return VerifierSession(stage, *ends, codec, self.limits, self.slab)

    def probe(self) -> None:
        """Have one token verified, so that "ready" means it works."""
        self._probe(write_block(Block((0,), 0, Sampling())))


def load_verifier(
    blueprint: Blueprint,
    name: str,
    limits: ServerLimits | None = None,
    progress: Progress | None = None,
) -> Verifier:
    """The verifier for ``blueprint``, all of it; ``name`` is what people call the model."""
    stage = blueprint.stage(range(blueprint.layers), progress, "all layers")
    embed, head = blueprint.ends()
    return Verifier(
        stage,
        embed,
        head,
        blueprint.vocab_size,
        take_fingerprint(blueprint, None, name),
        blueprint.hidden_size,
        limits,
        blueprint.precision.name,
    )
