"""Frames: what is encoded is decoded again, and nothing else is let in."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aparte.errors import FrameError
from aparte.step import Step, chain_parents
from aparte.wire.frames import (
    ERROR_CODES,
    MAX_HEADER_BYTES,
    MAX_NODES,
    MAX_RESUME,
    ErrorFrame,
    Frame,
    Hello,
    ResultFrame,
    StepFrame,
    Welcome,
    decode,
    encode,
)

counters = st.integers(0, 2**40)
payloads = st.binary(max_size=64)
milliseconds = st.integers(1, 10**8).map(lambda hundredths: hundredths / 100)
fingerprints = st.dictionaries(st.text(max_size=12), st.text(max_size=40), max_size=6)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    base = draw(counters)
    parents = tuple(draw(st.integers(-1, base + node - 1)) for node in range(draw(st.integers(1, 12))))
    return Step(draw(counters), draw(counters), draw(st.integers(-1, base - 1)), base, parents)


frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(
        Hello,
        fingerprints,
        st.text(max_size=32),
        st.integers(0, 1000),
        resume=st.none() | st.text(max_size=MAX_RESUME),
    ),
    st.builds(
        Welcome,
        fingerprints,
        max_nodes=st.integers(1, MAX_NODES),
        max_context=st.integers(1, 2**40),
        dtype=st.text(max_size=32),
        version=st.integers(0, 1000),
        resume=st.text(max_size=MAX_RESUME),
        resumed=st.booleans(),
    ),
    st.builds(StepFrame, steps(), payloads),
    st.builds(ResultFrame, counters, milliseconds, st.just(0.0) | milliseconds, payloads),
    st.builds(
        ErrorFrame,
        st.sampled_from(ERROR_CODES),
        st.text(max_size=200),
        st.just(0.0) | st.integers(1, 9_999_999).map(lambda tenths: tenths / 10),
    ),
)


def header_of(message: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from(">I", message)
    header: dict[str, Any] = json.loads(message[4 : 4 + length])
    return header


def message(header: object, payload: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">I", len(text) if length is None else length) + text + payload


STEP = {"k": "step", "s": 1, "e": 0, "c": 3, "b": 4, "n": 2}
TREE = {"k": "step", "s": 1, "e": 0, "c": 3, "b": 4, "p": [3, 3]}
OUT = {"k": "out", "s": 1, "ms": 1.5, "q": 0.5}
HELLO = {"k": "hello", "v": 1, "model": {"name": "x"}, "wire": "float16"}
WELCOME = {"k": "welcome", "v": 1, "model": {"name": "x"}, "nodes": 512, "context": 2048}
ERROR = {"k": "error", "code": "limit", "message": "too much"}


@settings(deadline=None)
@given(frames)
def test_every_frame_survives_the_way(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize("header", [STEP, TREE, OUT, HELLO, WELCOME, ERROR], ids=lambda header: header["k"])
def test_the_headers_that_the_tests_below_spoil_are_good(header: dict[str, Any]) -> None:
    decode(message(header))


@settings(deadline=None)
@given(st.integers(-1, 5000), st.integers(0, 100), st.integers(1, 600))
def test_a_chain_is_sent_without_its_parents(tip: int, gap: int, count: int) -> None:
    base = tip + 1 + gap
    step = Step(7, 0, tip, base, chain_parents(tip, base, count))
    sent = encode(StepFrame(step, b""))
    assert header_of(sent) == {"k": "step", "s": 7, "e": 0, "c": tip, "b": base, "n": count}
    assert decode(sent) == StepFrame(step, b"")


def test_a_tree_is_sent_with_its_parents() -> None:
    step = Step(7, 0, 3, 4, (3, 3, 4))
    assert header_of(encode(StepFrame(step, b"")))["p"] == [3, 3, 4]


def test_a_chain_below_another_node_than_the_tip_is_sent_with_its_parents() -> None:
    step = Step(7, 1, 3, 9, (5, 9, 10))
    assert decode(encode(StepFrame(step, b""))) == StepFrame(step, b"")


def test_headers_cost_less_than_five_percent_of_a_sequential_step() -> None:
    """At 576 values of 2 bytes each way, in the middle of a long conversation."""
    step = Step(4000, 0, 4000, 4001, (4000,))
    up = encode(StepFrame(step, b""))
    down = encode(ResultFrame(4000, 55.12, 0.05, b""))
    assert len(up) + len(down) < 0.05 * 2 * 576 * 2


def test_a_step_with_the_most_nodes_fits_the_header_limit() -> None:
    tip = 131_072
    step = Step(10**6, 10**3, tip, tip + 1, (tip,) * MAX_NODES)
    sent = encode(StepFrame(step, b""))
    assert len(sent) <= MAX_HEADER_BYTES
    assert decode(sent) == StepFrame(step, b"")


def test_the_payload_is_not_copied() -> None:
    sent = encode(StepFrame(Step(0, 0, -1, 0, (-1,)), b"payload"))
    frame = decode(sent)
    assert isinstance(frame, StepFrame)
    assert isinstance(frame.payload, memoryview)
    assert frame.payload.obj is sent


def test_times_are_sent_to_a_hundredth_of_a_millisecond() -> None:
    frame = decode(encode(ResultFrame(1, 1.23456, 0.001, b"")))
    assert frame == ResultFrame(1, 1.23, 0.0, b"")


NUMBER_FIELDS = [
    *((STEP, key) for key in "secbn"),
    *((OUT, key) for key in ("s", "ms", "q")),
    (HELLO, "v"),
    *((WELCOME, key) for key in ("v", "nodes", "context")),
]


@pytest.mark.parametrize("value", [True, False, None, "1", [1], {}, -2, 2**60, 10**400, 1e300, -0.5])
@pytest.mark.parametrize(
    ("header", "key"), NUMBER_FIELDS, ids=lambda item: item if isinstance(item, str) else item["k"]
)
def test_numbers_have_the_right_type_and_size(header: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(FrameError, match=rf"'{key}'"):
        decode(message({**header, key: value}))


def test_a_number_that_becomes_an_infinity_is_refused() -> None:
    with pytest.raises(FrameError, match="'ms'"):
        decode(message(b'{"k":"out","s":1,"ms":1e999}'))


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize("field", [b'"ms":%s', b'"ms":1,"q":%s', b'"ms":1,"unknown":%s', b'"ms":1,"x":[%s]'])
def test_constants_that_are_not_json_are_refused(field: bytes, constant: bytes) -> None:
    with pytest.raises(FrameError, match="not JSON"):
        decode(message(b'{"k":"out","s":1,' + field % constant + b"}"))


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        pytest.param({**STEP, "c": 4}, "overwrite", id="commits the slot it writes"),
        pytest.param({**STEP, "c": 9}, "overwrite", id="commits a slot to come"),
        pytest.param({**STEP, "n": 0}, "'n'", id="no nodes"),
        pytest.param({**STEP, "n": MAX_NODES + 1}, "'n'", id="too long a chain"),
        pytest.param({**TREE, "p": []}, "'p'", id="no parents"),
        pytest.param({**TREE, "p": {"0": 3}}, "'p'", id="parents are an object"),
        pytest.param({**TREE, "p": [3, True]}, "'p'", id="a parent is a truth value"),
        pytest.param({**TREE, "p": [3, 3.0]}, "'p'", id="a parent is a float"),
        pytest.param({**TREE, "p": [3, None]}, "'p'", id="a parent is nothing"),
        pytest.param({**TREE, "p": [3, -2]}, "'p'", id="a parent below the root"),
        pytest.param({**TREE, "p": [3, 2**60]}, "'p'", id="a huge parent"),
        pytest.param({**TREE, "p": [3] * (MAX_NODES + 1)}, "'p'", id="too many parents"),
        pytest.param({**TREE, "p": [4, 3]}, "does not come before", id="a node is its own parent"),
        pytest.param({**TREE, "p": [5, 3]}, "does not come before", id="a parent comes later"),
        pytest.param({**TREE, "p": None}, "'p'", id="parents are nothing"),
        pytest.param({"k": "step"}, "'c'", id="an empty step"),
        pytest.param({**HELLO, "model": []}, "'model'", id="fingerprint is a list"),
        pytest.param({**HELLO, "model": None}, "'model'", id="no fingerprint"),
        pytest.param({**HELLO, "model": {"name": 1}}, "'model'", id="fingerprint of numbers"),
        pytest.param({**HELLO, "model": {"name": {"a": "b"}}}, "'model'", id="nested fingerprint"),
        pytest.param({**HELLO, "model": {str(i): "" for i in range(17)}}, "'model'", id="long fingerprint"),
        pytest.param({**HELLO, "wire": 16}, "'wire'", id="wire format is a number"),
        pytest.param({**HELLO, "wire": "x" * 33}, "'wire'", id="wire format is too long"),
        pytest.param({**WELCOME, "dtype": 16}, "'dtype'", id="dtype is a number"),
        pytest.param({**WELCOME, "dtype": None}, "'dtype'", id="dtype is nothing"),
        pytest.param({**WELCOME, "dtype": "x" * 33}, "'dtype'", id="dtype is too long"),
        pytest.param({**HELLO, "resume": 7}, "'resume'", id="resume is a number"),
        pytest.param({**HELLO, "resume": None}, "'resume'", id="resume is nothing"),
        pytest.param({**HELLO, "resume": "x" * 65}, "'resume'", id="resume is too long"),
        pytest.param({**WELCOME, "resume": "x" * 65}, "'resume'", id="the name is too long"),
        pytest.param({**WELCOME, "resumed": 1}, "'resumed'", id="resumed is a number"),
        pytest.param({**WELCOME, "resumed": None}, "'resumed'", id="resumed is nothing"),
        pytest.param({**ERROR, "message": "x" * 2001}, "'message'", id="error message is too long"),
        pytest.param({**ERROR, "code": None}, "'code'", id="no error code"),
        pytest.param({**ERROR, "after": "5"}, "'after'", id="the wait is a string"),
        pytest.param({**ERROR, "after": True}, "'after'", id="the wait is a bool"),
        pytest.param({**ERROR, "after": -1}, "'after'", id="the wait is over"),
        pytest.param({**ERROR, "after": 1e6}, "'after'", id="the wait is endless"),
        pytest.param({"k": "steps"}, "unknown kind", id="unknown kind"),
        pytest.param({"k": ["step"]}, "unknown kind", id="kind is a list"),
        pytest.param({"s": 1}, "unknown kind", id="no kind"),
        pytest.param([STEP], "not a JSON object", id="a list"),
        pytest.param("step", "not a JSON object", id="a string"),
        pytest.param(None, "not a JSON object", id="null"),
        pytest.param(b"", "not JSON", id="empty header"),
        pytest.param(b"\xff\xfe\x00", "not JSON", id="not UTF-8"),
        pytest.param(json.dumps(STEP).encode("utf-16"), "not JSON", id="UTF-16"),
        pytest.param(b'{"k":"step"', "not JSON", id="cut off"),
        pytest.param(b'{"k":"out"} {}', "not JSON", id="two headers"),
        pytest.param(b"[" * 60_000, "not JSON", id="deep nesting, open"),
        pytest.param(b"[" * 30_000 + b"]" * 30_000, "not JSON", id="deep nesting"),
        pytest.param(b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "not JSON", id="deep objects"),
        pytest.param(b"1" * 60_000, "not JSON", id="a number of many digits"),
    ],
)
def test_broken_headers_are_refused(header: object, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        decode(message(header))


@pytest.mark.parametrize("depth", range(100, 1100, 50))
def test_nesting_near_the_interpreters_limit_is_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    with pytest.raises(FrameError):
        decode(message(b'{"k":"hello","v":1,"wire":"float16","model":{"name":' + nested + b"}}"))


@pytest.mark.parametrize("header", [HELLO, WELCOME, ERROR], ids=lambda header: header["k"])
def test_a_payload_where_none_belongs_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="payload"):
        decode(message(header, b"\0"))


@pytest.mark.parametrize("size", range(4))
def test_a_message_without_a_length_is_refused(size: int) -> None:
    with pytest.raises(FrameError, match="shorter"):
        decode(b"\0" * size)


@pytest.mark.parametrize("excess", [1, 1000, 2**31])
def test_a_header_longer_than_its_message_is_refused(excess: int) -> None:
    text = json.dumps(OUT).encode()
    with pytest.raises(FrameError, match="longer"):
        decode(message(text, length=len(text) + excess))


def test_a_header_longer_than_the_limit_is_refused_unread() -> None:
    text = json.dumps({**OUT, "pad": "x" * MAX_HEADER_BYTES}).encode()
    with pytest.raises(FrameError, match="limit"):
        decode(message(text))


def test_names_are_shortened_not_refused() -> None:
    frame = decode(encode(Hello({"name": "x" * 1000}, "float16")))
    assert isinstance(frame, Hello)
    assert frame.fingerprint == {"name": "x" * 256}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
field_names = st.sampled_from(
    ["s", "e", "c", "b", "n", "p", "ms", "q", "v", "model", "wire", "nodes", "context", "code"]
)
kinds = st.sampled_from(["hello", "welcome", "step", "out", "error"])


@settings(deadline=None)
@given(kinds, st.dictionaries(field_names, json_values, max_size=8), payloads)
def test_any_json_is_read_or_refused(kind: str, header: dict[str, Any], payload: bytes) -> None:
    read_or_refused(message({"k": kind, **header}, payload))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read_or_refused(data)
    read_or_refused(message(data))


@settings(max_examples=300, deadline=None)
@given(frames, st.randoms(use_true_random=False))
def test_any_mutation_is_read_or_refused(frame: Frame, rng: random.Random) -> None:
    data = bytearray(encode(frame))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at : at + 1] = rng.choice([b"-", b"9", b"[", b"{", b'"', b"}", b"\0", b"\xff"])
            case 3:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
    read_or_refused(bytes(data))


def read_or_refused(data: bytes) -> None:
    """Nothing but a frame or a :class:`FrameError` may come of it."""
    try:
        frame = decode(data)
    except FrameError:
        return
    assert isinstance(frame, Frame)
    if isinstance(frame, StepFrame):
        assert len(frame.step) <= MAX_NODES
