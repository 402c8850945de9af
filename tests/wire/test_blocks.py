"""Blocks: what is written is read again, and nothing else is let in."""

from __future__ import annotations

import math
import struct
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aparte.config import Sampling
from aparte.distribution import Distribution, Row
from aparte.errors import FrameError, UserError
from aparte.step import ROOT, Step, chain_parents
from aparte.wire.blocks import (
    HEAD_BYTES,
    LIKELY_BYTES,
    MAX_LIKELY,
    MAX_WIDTH,
    NODE_BYTES,
    UNDECIDED,
    Block,
    Rule,
    Verdict,
    certain,
    check_block,
    judged,
    read_block,
    read_verdict,
    write_block,
    write_verdict,
)

VOCAB = 300
SAMPLED = Sampling(temperature=0.7, top_p=0.95, top_k=40, min_p=0.01, seed=2**62)

samplings = st.just(Sampling()) | st.builds(
    Sampling,
    temperature=st.floats(0.01, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1000),
    min_p=st.floats(0, 0.99),
    seed=st.integers(0, 2**63 - 1),
)


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    """With probabilities that float32 can hold."""
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6, unique=True))
    weights = [draw(st.integers(1, 100)) for _ in tokens]
    shares = [struct.unpack("<f", struct.pack("<f", one / sum(weights)))[0] for one in weights]
    return Distribution(tuple(tokens), tuple(shares))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A chain of known tokens, and a tree below its last one, or below a slot of another step."""
    base = draw(st.integers(0, 1000))
    count = draw(st.integers(1, 12))
    parents = tuple(draw(st.integers(-1, base + node - 1)) for node in range(count))
    return Step(draw(st.integers(0, 99)), 0, draw(st.integers(-1, base - 1)), base, parents)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Step, Block]:
    step = draw(steps())
    tokens = tuple(draw(st.integers(0, 2**32 - 1)) for _ in range(len(step)))
    choose_from = draw(st.integers(0, len(step)))
    plain = Block(
        tokens,
        choose_from,
        draw(samplings),
        draw(st.booleans()),
        draw(st.integers(0, 65_535)),
        likely=draw(st.integers(0, MAX_LIKELY)),
    )
    if plain.rule is Rule.REJECTION and draw(st.booleans()):
        return step, replace(plain, drawn=tuple(draw(distributions()) for _ in judged(step, choose_from)))
    return step, plain


def meant(block: Block) -> Block:
    """The block without what does not matter to its rule."""
    if block.rule in (Rule.NOTHING, Rule.GREEDY):
        return replace(block, sampling=Sampling(), rejection=False)
    return block


@settings(deadline=None)
@given(blocks())
def test_every_block_survives_the_way(pair: tuple[Step, Block]) -> None:
    step, block = pair
    payload = write_block(block)
    assert read_block(payload, step) == meant(block)
    assert read_block(payload, step).rule is block.rule
    assert len(payload) <= HEAD_BYTES + NODE_BYTES * len(step)


@settings(deadline=None)
@given(st.binary(max_size=400), steps())
def test_random_bytes_are_a_block_or_an_error(payload: bytes, step: Step) -> None:
    try:
        block = read_block(payload, step)
    except FrameError:
        return
    assert len(block.tokens) == len(step)


@settings(deadline=None, max_examples=200)
@given(blocks(), st.data())
def test_a_damaged_block_is_a_block_or_an_error(pair: tuple[Step, Block], data: st.DataObject) -> None:
    step, block = pair
    payload = bytearray(write_block(block))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = read_block(bytes(payload), step)
    except FrameError:
        return
    assert len(read.tokens) == len(step)


@given(blocks(), st.integers(1, 8))
def test_a_block_has_exactly_its_size(pair: tuple[Step, Block], difference: int) -> None:
    step, block = pair
    payload = write_block(block)
    for wrong in (payload[:-difference], payload + bytes(difference)):
        with pytest.raises(FrameError):
            check_block(wrong, step)


def test_nothing_is_allocated_for_what_a_header_promises() -> None:
    """The widest distributions for the longest step, in a message of a few bytes."""
    step = Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, 4096))
    header = struct.pack("<BBHHHdddQI", Rule.REJECTION, 0, MAX_WIDTH, 0, 0, 1.0, 1.0, 0.0, 0, 0)
    tracemalloc.start()
    with pytest.raises(FrameError, match="should have"):
        read_block(header, step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000


CHAIN = Step(1, 0, 4, 5, (4, 5, 6))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(struct.pack("<BBHHH3I", 9, 0, 0, 0, 0, 1, 2, 3), id="an unknown rule"),
        pytest.param(struct.pack("<BBHHH3I", 1, 17, 0, 0, 0, 1, 2, 3), id="too many named"),
        pytest.param(
            struct.pack("<BBHHH3I", 1, 0, 0, 4, 0, 1, 2, 3), id="choices of nodes that are not there"
        ),
        pytest.param(struct.pack("<BBHHH3I", 0, 0, 0, 2, 0, 1, 2, 3), id="no rule for a choice"),
        pytest.param(struct.pack("<BBHHH3I", 1, 0, 0, 3, 0, 1, 2, 3), id="a rule for no choice"),
        pytest.param(struct.pack("<BBHHH3I", 1, 0, 4, 0, 0, 1, 2, 3), id="distributions for greedy"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        read_block(payload, CHAIN)


@pytest.mark.parametrize(
    "settings_",
    [
        (math.nan, 1.0, 0.0, 0, 0),
        (math.inf, 1.0, 0.0, 0, 0),
        (-1.0, 1.0, 0.0, 0, 0),
        (0.0, 1.0, 0.0, 0, 0),
        (1.0, 0.0, 0.0, 0, 0),
        (1.0, math.nan, 0.0, 0, 0),
        (1.0, 1.0, 1.0, 0, 0),
        (1.0, 1.0, 0.0, 2**63, 0),
    ],
)
def test_settings_that_cannot_be_are_refused(settings_: tuple[float, float, float, int, int]) -> None:
    payload = struct.pack("<BBHHHdddQI3I", Rule.COUPLED, 0, 0, 0, 0, *settings_, 1, 2, 3)
    with pytest.raises(FrameError):
        read_block(payload, CHAIN)


@pytest.mark.parametrize(
    ("tokens", "shares"),
    [
        ((1, 1), (0.5, 0.5)),
        ((1, 2), (0.5, 0.6)),
        ((1, 2), (-0.5, 1.5)),
        ((1, 2), (math.nan, 1.0)),
        ((2**32 - 1, 2), (0.5, 0.5)),  # none at all
    ],
)
def test_what_is_no_distribution_is_refused(tokens: tuple[int, int], shares: tuple[float, float]) -> None:
    good = write_block(Block((1, 2, 3), 0, SAMPLED, True, 0, (Distribution((1, 2), (0.5, 0.5)),) * 2))
    bad = good[:-16] + struct.pack("<2I2f", *tokens, *shares)
    assert len(read_block(good, CHAIN).drawn) == 2
    with pytest.raises(FrameError):
        read_block(bad, CHAIN)


def test_a_distribution_that_is_too_wide_is_refused_where_it_is_written() -> None:
    wide = Distribution(tuple(range(MAX_WIDTH + 1)), (1.0, *[0.0] * MAX_WIDTH))
    with pytest.raises(UserError, match="Draft from fewer"):
        write_block(Block((1, 2, 3), 0, SAMPLED, True, 0, (wide, wide)))


def test_no_vector_over_the_vocabulary_crosses_the_wire() -> None:
    """A block of eight costs what its ids cost; with distributions, what the ids they name cost."""
    step = Step(1, 0, 4, 5, chain_parents(4, 5, 9))
    tokens = tuple(range(9))
    assert len(write_block(Block(tokens, 0, Sampling()))) == 8 + 9 * 4
    assert len(write_block(Block(tokens, 0, SAMPLED))) == 44 + 9 * 4
    narrow = Distribution((1, 2, 3, 4), (0.25,) * 4)
    drawn = (narrow,) * len(judged(step, 0))
    assert len(write_block(Block(tokens, 0, SAMPLED, True, 0, drawn))) == 44 + 9 * 4 + 8 * 4 * 8
    assert len(write_verdict(Verdict(tokens))) == 9 * 4
    rows = (((1, 0.5), (2, 0.25)),) * 9
    assert len(write_verdict(Verdict(tokens, rows))) == 9 * (4 + 2 * LIKELY_BYTES)


# -- Which nodes are what --------------------------------------------------------------------------


def test_below_a_pending_token_everything_is_judged() -> None:
    step = Step(1, 0, 4, 5, (4, 5, 6, 7, 7))  # two known tokens, the pending one, two drafts below it
    assert judged(step, 2) == (3, 4)


def test_in_a_step_sent_ahead_the_first_nodes_are_roots() -> None:
    step = Step(2, 0, 4, 10, (9, 9, 10, 11))  # two below a slot of the step before, one below each of them
    assert judged(step, 0) == (2, 3)
    block = Block((7, 8, 1, 2), 0, Sampling())
    assert certain(step, block, (1, 9, 5, 5)) == (0, 1, 2)
    assert certain(step, block, (9, 2, 5, 5)) == (0, 1, 3)


def test_certain_are_the_known_tokens_and_the_accepted_path() -> None:
    step = Step(1, 0, 4, 5, (4, 5, 6, 7, 7, 9))
    block = Block((1, 2, 3, 7, 8, 9), 2, Sampling())
    assert certain(step, block, (8, 0, 9, 5)) == (0, 1, 2, 4, 5)
    assert certain(step, block, (8, 0, 1, UNDECIDED)) == (0, 1, 2, 4)
    assert certain(step, block, (0, UNDECIDED, UNDECIDED, UNDECIDED)) == (0, 1, 2)
    assert certain(step, replace(block, choose_from=6), ()) == tuple(range(6))


# -- Verdicts --------------------------------------------------------------------------------------

BLOCK = Block((1, 2, 3), 1, Sampling())


NAMED = replace(BLOCK, likely=2)
ROWS = (((4, 0.5), (1, 0.25)), ((7, 1.0), (0, 0.0)))


@pytest.mark.parametrize(("block", "likely"), [(BLOCK, ()), (NAMED, ROWS)])
def test_a_verdict_survives_the_way(block: Block, likely: tuple[Row, ...]) -> None:
    sent = Verdict((3, 7), likely, b"states")
    got = read_verdict(write_verdict(sent), CHAIN, block, VOCAB)
    assert (got.choices, got.likely, bytes(got.states)) == (sent.choices, sent.likely, sent.states)


@pytest.mark.parametrize(
    ("choices", "likely", "sentence"),
    [
        ((3,), (), "bytes only"),
        ((3, VOCAB), (), "does not have"),
        ((-2, 3), (), "does not have"),
        ((UNDECIDED, 3), (), "ends before"),
        ((3, UNDECIDED), (), "ends before"),
        ((3, 7), ROWS[:1], "bytes only"),
        ((3, 7), (((4, 0.5), (VOCAB, 0.25)), ROWS[1]), "does not have"),
        ((3, 7), (((4, 0.5), (1, -0.25)), ROWS[1]), "a share that is none"),
        ((3, 7), (((4, 1.5), (1, 0.25)), ROWS[1]), "a share that is none"),
        ((3, 7), (((4, float("nan")), (1, 0.25)), ROWS[1]), "a share that is none"),
    ],
)
def test_a_verdict_that_lies_is_refused(
    choices: tuple[int, ...], likely: tuple[Row, ...], sentence: str
) -> None:
    with pytest.raises(FrameError, match=sentence):
        read_verdict(write_verdict(Verdict(choices, likely)), CHAIN, NAMED if likely else BLOCK, VOCAB)


def test_what_is_off_the_path_may_be_undecided() -> None:
    payload = write_verdict(Verdict((9, UNDECIDED)))
    assert read_verdict(payload, CHAIN, BLOCK, VOCAB).choices == (9, UNDECIDED)


@settings(deadline=None)
@given(st.binary(max_size=100), blocks())
def test_random_bytes_are_a_verdict_or_an_error(payload: bytes, pair: tuple[Step, Block]) -> None:
    step, block = pair
    try:
        verdict = read_verdict(payload, step, block, VOCAB)
    except FrameError:
        return
    count = len(step) - block.choose_from
    assert len(verdict.choices) == count
    assert len(verdict.likely) == (count if block.likely else 0)
    assert (4 + LIKELY_BYTES * block.likely) * count + len(verdict.states) == len(payload)
