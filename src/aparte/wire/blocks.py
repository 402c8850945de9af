"""Blocks: the payloads of steps and results in draft mode. No socket, clock or tensor in here.

A step's payload, little-endian:

    | rule u8 | likely u8 | width u16 | choose_from u16 | layer u16 |
    | temperature f64 | top_p f64 | min_p f64 | seed u64 | top_k u32 |    (coupled and rejection only)
    | token ids u32 x nodes |
    | ids u32 x width, probabilities f32 x width |                        (per drafted node, if it was drawn)

The rule and its settings travel with every step, so that a step means the same whenever it is sent. A result:

    | choices i32 x n |                                    (after each of the n nodes from choose_from on)
    | ids u32 x n x likely, shares f16 x n x likely |      (the most probable tokens there, best first)
    | states |                                             (if layer is not 0)

States are the output of the model's first ``layer`` layers for the nodes that are certain now
(:func:`certain`). No vector over the vocabulary ever crosses the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from aparte.config import MAX_TOP, Sampling
from aparte.distribution import UNDECIDED, Distribution, Row
from aparte.errors import FrameError, UserError
from aparte.step import Step

#: Most tokens that are named beside a choice, and bytes of each.
MAX_LIKELY = 16
LIKELY_BYTES = 6
#: Most tokens in a distribution that a drafted token was drawn from.
MAX_WIDTH = MAX_TOP
#: Most bytes of a node, and of a block beside its nodes.
NODE_BYTES = 4 + 8 * MAX_WIDTH

_HEAD = struct.Struct("<BBHHH")
_SAMPLING = struct.Struct("<dddQI")
HEAD_BYTES = _HEAD.size + _SAMPLING.size
#: Fills the places of a distribution that is narrower than the widest one.
_NO_TOKEN = 2**32 - 1


class Rule(IntEnum):
    """How the verifier comes to its choices."""

    NOTHING = 0  # none is wanted: a part of a prompt
    GREEDY = 1
    COUPLED = 2  # Gumbel noise from seed and position: what the whole model alone would write
    REJECTION = 3  # against the distributions that the tokens were drawn from


@dataclass(frozen=True)
class Block:
    """What a step carries: a token per node, and how to choose.

    There is a choice after each node from ``choose_from`` on. ``drawn`` has one distribution for each of
    :func:`judged`'s nodes, or none where they were not drawn. ``layer`` is the number of layers whose output
    comes back, 0 for none; ``likely`` how many of the most probable tokens are named beside each choice.
    """

    tokens: tuple[int, ...]
    choose_from: int
    sampling: Sampling
    rejection: bool = False
    layer: int = 0
    drawn: tuple[Distribution, ...] = ()
    likely: int = 0

    @property
    def rule(self) -> Rule:
        if self.choose_from == len(self.tokens):
            return Rule.NOTHING
        if self.sampling.greedy:
            return Rule.GREEDY
        return Rule.REJECTION if self.rejection else Rule.COUPLED


_RULES = frozenset(Rule)
_SAMPLED = frozenset((Rule.COUPLED, Rule.REJECTION))


def judged(step: Step, choose_from: int) -> tuple[int, ...]:
    """The nodes that hang below one with a choice: what the rule accepts or rejects.

    The others from ``choose_from`` on are *roots*. One is the pending token; in a step that was sent ahead
    each node right below the path foreseen is one, because the step before decides about it.
    """
    first = step.base + choose_from
    return tuple(node for node in range(choose_from, len(step)) if step.parents[node] >= first)


def certain(step: Step, block: Block, choices: Sequence[int]) -> tuple[int, ...]:
    """The nodes that are certain once their root is: all before ``choose_from``, the roots, and what is
    accepted below them. Both sides work it out alike."""
    found = set(range(block.choose_from))
    for node in range(block.choose_from, len(step)):
        parent = step.parents[node] - step.base
        is_root = parent < block.choose_from
        if is_root or (parent in found and choices[parent - block.choose_from] == block.tokens[node]):
            found.add(node)
    return tuple(sorted(found))


def write_block(block: Block) -> bytes:
    """The payload of a step. Raises :class:`UserError` if a distribution is too wide."""
    rule = block.rule
    drawn = block.drawn if rule is Rule.REJECTION else ()
    width = max(map(len, drawn), default=0)
    if width > MAX_WIDTH:
        raise UserError(
            f"A token was drawn from {width} candidates; at most {MAX_WIDTH} can be told to the verifier. "
            "Draft from fewer."
        )
    parts = [_HEAD.pack(rule, block.likely, width, block.choose_from, block.layer)]
    if rule in _SAMPLED:
        how = block.sampling
        top_k = min(how.top_k, 2**32 - 1)
        parts.append(_SAMPLING.pack(how.temperature, how.top_p, how.min_p, how.seed, top_k))
    parts.append(struct.pack(f"<{len(block.tokens)}I", *block.tokens))
    for one in drawn:
        spare = width - len(one)
        parts.append(struct.pack(f"<{width}I", *one.tokens, *[_NO_TOKEN] * spare))
        parts.append(struct.pack(f"<{width}f", *one.probabilities, *[0.0] * spare))
    return b"".join(parts)


@dataclass(frozen=True)
class _Head:
    """What the fixed header says, and where things are."""

    rule: Rule
    width: int
    choose_from: int
    layer: int
    likely: int
    drafts: int  # nodes with a distribution
    tokens_at: int
    drawn_at: int


def check_block(payload: bytes | memoryview, step: Step) -> _Head:
    """Raises :class:`FrameError` if header, size and ``step`` do not agree. Reads nothing but the header."""
    count = len(step)
    if len(payload) < _HEAD.size:
        raise FrameError("A block is shorter than its header.")
    number, named, width, choose_from, layer = _HEAD.unpack_from(payload)
    if number not in _RULES or named > MAX_LIKELY or choose_from > count or width > MAX_WIDTH:
        raise FrameError("A block's header is out of range.")
    rule = Rule(number)
    if (rule is Rule.NOTHING) != (choose_from == count) or (width and rule is not Rule.REJECTION):
        raise FrameError("A block's header contradicts itself.")
    drafts = len(judged(step, choose_from)) if width else 0
    tokens_at = _HEAD.size + (_SAMPLING.size if rule in _SAMPLED else 0)
    drawn_at = tokens_at + 4 * count
    size = drawn_at + 8 * width * drafts
    if len(payload) != size:
        raise FrameError(f"A block for {count} nodes should have {size} bytes and has {len(payload)}.")
    return _Head(rule, width, choose_from, layer, named, drafts, tokens_at, drawn_at)


def read_block(payload: bytes | memoryview, step: Step) -> Block:
    """Raises :class:`FrameError` for anything that is not exactly a block for ``step``.

    Header and size are checked first, so what is allocated is bounded by the message.
    """
    head = check_block(payload, step)
    return Block(
        struct.unpack_from(f"<{len(step)}I", payload, head.tokens_at),
        head.choose_from,
        _read_sampling(payload) if head.rule in _SAMPLED else Sampling(),
        head.rule is Rule.REJECTION,
        head.layer,
        tuple(
            _read_drawn(payload, head.drawn_at + 8 * head.width * index, head.width)
            for index in range(head.drafts)
        ),
        head.likely,
    )


def _read_sampling(payload: bytes | memoryview) -> Sampling:
    temperature, top_p, min_p, seed, top_k = _SAMPLING.unpack_from(payload, _HEAD.size)
    try:
        sampling = Sampling(temperature, top_p, top_k, min_p, seed)
    except UserError as error:
        raise FrameError(f"A block asks for what cannot be: {error}") from None
    if sampling.greedy:
        raise FrameError("A block's header contradicts itself.")
    return sampling


def _read_drawn(payload: bytes | memoryview, at: int, width: int) -> Distribution:
    tokens = struct.unpack_from(f"<{width}I", payload, at)
    length = next((place for place, token in enumerate(tokens) if token == _NO_TOKEN), width)
    try:
        return Distribution(tokens[:length], struct.unpack_from(f"<{length}f", payload, at + 4 * width))
    except ValueError as error:
        raise FrameError(str(error)) from None


@dataclass(frozen=True)
class Verdict:
    """What a result holds: ``likely`` has a row for each choice, or is empty; ``states`` are bytes."""

    choices: tuple[int, ...]
    likely: tuple[Row, ...] = ()
    states: bytes | memoryview = b""


def write_verdict(verdict: Verdict) -> bytes:
    """The payload of a result. All rows of ``likely`` have one length."""
    named = [one for row in verdict.likely for one in row]
    return b"".join(
        (
            struct.pack(f"<{len(verdict.choices)}i", *verdict.choices),
            struct.pack(f"<{len(named)}I", *(token for token, _ in named)),
            struct.pack(f"<{len(named)}e", *(share for _, share in named)),
            verdict.states,
        )
    )


def read_verdict(payload: bytes | memoryview, step: Step, block: Block, vocab_size: int) -> Verdict:
    """Raises :class:`FrameError` if a choice is missing or no token of the model, or what is named beside it
    is none or has no share. After a node that is certain there has to be a choice."""
    count = len(step) - block.choose_from
    named = count * block.likely
    if len(payload) < 4 * count + LIKELY_BYTES * named:
        raise FrameError(f"A verdict on {count} nodes has {len(payload)} bytes only.")
    choices = struct.unpack_from(f"<{count}i", payload)
    tokens = struct.unpack_from(f"<{named}I", payload, 4 * count)
    shares = struct.unpack_from(f"<{named}e", payload, 4 * (count + named))
    if (
        not all(UNDECIDED <= choice < vocab_size for choice in choices)
        or max(tokens, default=0) >= vocab_size
    ):
        raise FrameError("A verdict holds a token that the model does not have.")
    if not all(0 <= share <= 1 for share in shares):  # a comparison with NaN is false
        raise FrameError("A verdict names a token with a share that is none.")
    needed = (node - block.choose_from for node in certain(step, block, choices) if node >= block.choose_from)
    if any(choices[place] == UNDECIDED for place in needed):
        raise FrameError("A verdict ends before the path that it accepts.")
    pairs = tuple(zip(tokens, shares, strict=True))
    rows = tuple(pairs[at : at + block.likely] for at in range(0, named, block.likely or 1))
    return Verdict(choices, rows, memoryview(payload)[4 * count + LIKELY_BYTES * named :])
