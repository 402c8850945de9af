"""Hidden states as bytes."""

from __future__ import annotations

import pytest
import torch

from aparte.errors import FrameError, UserError, WireOverflowError
from aparte.wire.tensors import WIRE_DTYPES, TensorCodec

WIDTH = 8


def random_states(nodes: int = 5) -> torch.Tensor:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(1)) * 100


@pytest.mark.parametrize(("wire", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_a_node_costs_width_times_item_size(wire: str, size: int) -> None:
    codec = TensorCodec(wire, WIDTH)
    assert codec.bytes_per_node == WIDTH * size
    assert len(codec.encode(random_states(3))) == 3 * WIDTH * size


@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_what_is_decoded_is_the_nearest_number_of_the_format(wire: str) -> None:
    codec, states = TensorCodec(wire, WIDTH), random_states()
    decoded = codec.decode(codec.encode(states), 5)
    assert decoded.dtype == WIRE_DTYPES[wire]
    assert torch.equal(decoded, states.to(WIRE_DTYPES[wire]))


def test_bytes_are_little_endian() -> None:
    row = torch.tensor([[1.0, -2.0]])
    assert bytes(TensorCodec("float16", 2).encode(row)) == b"\x00\x3c\x00\xc0"
    assert bytes(TensorCodec("bfloat16", 2).encode(row)) == b"\x80\x3f\x00\xc0"
    assert bytes(TensorCodec("float32", 2).encode(row)) == b"\x00\x00\x80\x3f\x00\x00\x00\xc0"


def test_every_finite_bfloat16_survives_bit_for_bit() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[torch.isfinite(values)].view(-1, 256)
    codec = TensorCodec("bfloat16", 256)
    decoded = codec.decode(codec.encode(values), len(values))
    assert torch.equal(decoded.view(torch.int16), values.view(torch.int16))


def test_bfloat16_on_the_wire_keeps_what_float16_cannot_hold() -> None:
    states = torch.full((1, WIDTH), 3e5)
    codec = TensorCodec("bfloat16", WIDTH)
    assert codec.decode(codec.encode(states), 1).float().allclose(states, rtol=0.01)


def test_rows_of_a_larger_tensor_are_sent_as_they_are_seen() -> None:
    states = random_states(8).T  # [8, 8], not contiguous
    codec = TensorCodec("float32", WIDTH)
    assert torch.equal(codec.decode(codec.encode(states), 8), states)


def test_states_of_a_forward_pass_can_be_sent() -> None:
    with torch.inference_mode():
        states = random_states() * 1
    assert len(TensorCodec("float32", WIDTH).encode(states)) == 5 * WIDTH * 4


@pytest.mark.parametrize("value", [65_520.0, -65_520.0, 1e30])
def test_what_does_not_fit_float16_is_an_error_that_names_the_way_out(value: float) -> None:
    states = random_states()
    states[2, 3] = value
    with pytest.raises(WireOverflowError, match=r"65504.*--wire bfloat16"):
        TensorCodec("float16", WIDTH).encode(states)


def test_the_largest_float16_fits() -> None:
    codec = TensorCodec("float16", 1)
    assert codec.decode(codec.encode(torch.tensor([[65_504.0]])), 1).item() == 65_504


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_never_sent(wire: str, value: float) -> None:
    states = random_states()
    states[0, 0] = value
    with pytest.raises(WireOverflowError, match="not a finite number"):
        TensorCodec(wire, WIDTH).encode(states)


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_never_taken(wire: str, value: float) -> None:
    states = random_states().to(WIRE_DTYPES[wire])
    states[4, 7] = value
    payload = states.view(torch.uint8).numpy().tobytes()
    with pytest.raises(FrameError, match="not finite"):
        TensorCodec(wire, WIDTH).decode(payload, 5)


@pytest.mark.parametrize("difference", [-32, -4, -1, 1, 4, 32])
def test_a_payload_of_another_size_is_refused_with_both_numbers(difference: int) -> None:
    payload = bytes(5 * WIDTH * 4 + difference)
    with pytest.raises(FrameError, match=rf"5 nodes should carry 160 bytes and carries {len(payload)}"):
        TensorCodec("float32", WIDTH).decode(payload, 5)


def test_what_is_decoded_does_not_share_memory_with_the_message() -> None:
    payload = bytearray(TensorCodec("float32", WIDTH).encode(random_states()))
    decoded = TensorCodec("float32", WIDTH).decode(memoryview(payload), 5)
    payload[:] = bytes(len(payload))
    assert torch.equal(decoded, random_states())


def test_an_unknown_format_is_a_users_mistake_that_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="float16, bfloat16, float32"):
        TensorCodec("int4", WIDTH)
