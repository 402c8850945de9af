"""Packed linears: how far they are off, and that a row of integers does not depend on its neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from aparte.config import Compute
from aparte.model import linear as module
from aparte.model.linear import (
    TILED,
    Bfloat16Linear,
    Int8Linear,
    activation_levels,
    bf16_available,
    pack_linears,
    packed_available,
    packed_linear,
    tiles_available,
)
from aparte.model.parts import Blueprint

pytestmark = pytest.mark.skipif(not packed_available(), reason="this CPU has no packed kernels")


def by_hand(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The same arithmetic with integers as float64 numbers, which hold them exactly."""
    levels = activation_levels()
    of_weight = weight.abs().amax(1, keepdim=True).double() / 127
    of_input = x.abs().amax(-1, keepdim=True)
    inputs = (x / of_input / torch.tensor(1 / levels)).round().double()
    product = inputs @ (weight.double() / of_weight).round().T * of_weight.T / levels * of_input.double()
    return product if bias is None else product + bias


@pytest.mark.parametrize("biased", [True, False])
def test_it_is_integer_arithmetic(biased: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96), torch.randn(7, 96) * torch.logspace(-6, 6, 7)[:, None]
    bias = torch.randn(48) if biased else None
    got = Int8Linear(weight, bias)(x)
    expected = by_hand(weight, bias, x)
    assert torch.allclose(got.double(), expected, rtol=2e-5, atol=1e-5 * float(x.abs().max()) * 1e-6 + 1e-5)
    exact = nn.functional.linear(x, weight, bias)
    error = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
    # Rounding to n levels is off by a third of a level's half in the mean; every row has its own scale.
    assert error.max() < 0.03


@pytest.mark.parametrize("rows", [2, 5, 16, 33])
def test_a_row_is_the_same_alone_and_among_others(rows: int) -> None:
    linear = Int8Linear(torch.randn(200, 96), torch.randn(200))
    x = torch.randn(rows, 96)
    together = linear(x)
    for row in range(rows):
        assert torch.equal(linear(x[row : row + 1]), together[row : row + 1])


def test_the_largest_values_do_not_overflow() -> None:
    """Pairs of products saturate on some processors: all weights and inputs at their largest."""
    linear = Int8Linear(torch.ones(16, 512), None)
    torch.testing.assert_close(linear(torch.ones(3, 512)), torch.full((3, 16), 512.0), rtol=1e-3, atol=0)


def test_rows_of_zeros_and_of_tiny_numbers() -> None:
    weight = torch.randn(24, 40)
    weight[3] = 0
    linear = Int8Linear(weight, None)
    assert torch.equal(linear(torch.zeros(2, 40)), torch.zeros(2, 24))
    tiny = linear(torch.full((1, 40), 1e-20))
    assert torch.isfinite(tiny).all()
    assert float(tiny[0, 3]) == 0


@pytest.mark.skipif(not tiles_available(), reason="this CPU has no tiles of 8-bit integers")
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33])
def test_tiles_and_packed_integers_agree(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(TILED, 100), torch.randn(TILED), torch.randn(rows, 100)
    tiled = Int8Linear(weight, bias)
    monkeypatch.setattr(module, "tiles_available", lambda: False)
    packed = Int8Linear(weight, bias)
    assert (tiled.reads, packed.reads) == (torch.int8, torch.float32)
    torch.testing.assert_close(tiled(x), packed(x), rtol=1e-5, atol=1e-4)
    integers = torch.randint(-127, 128, (rows, 100))
    exact = integers.double() @ (weight / weight.abs().amax(1, keepdim=True) * 127).round().double().T
    scale = weight.abs().amax(1).double() / 127
    for linear in (tiled, packed):
        products = linear.products(integers.to(linear.reads))
        torch.testing.assert_close(products.double(), exact * scale, rtol=1e-6, atol=0)


def test_few_outputs_are_not_multiplied_in_tiles() -> None:
    """For one row and few outputs oneDNN falls back to code that takes fifty times as long."""
    assert Int8Linear(torch.randn(TILED - 1, 64), None).reads == torch.float32


def test_every_linear_is_replaced() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4, bias=False)))
    pack_linears(module, "int8")
    assert all(isinstance(child, Int8Linear) for child in (module[0], module[1][0]))
    assert not isinstance(packed_linear(torch.randn(8, 8), None, "packed16"), Int8Linear)


def test_a_model_in_int8_is_near_the_same_in_float32(llama_folder: Path) -> None:
    tokens = torch.tensor([5, 9, 200])
    outputs = []
    for dtype in ("float32", "int8"):
        blueprint = Blueprint.open(llama_folder, Compute(dtype, "cpu"))  # type: ignore[arg-type]
        assert blueprint.precision.name == dtype
        embed, head = blueprint.ends()
        outputs.append(head(embed(tokens)))
    assert outputs[1].dtype == torch.float32
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0 < error < 0.03


@pytest.mark.skipif(not bf16_available(), reason="this CPU has no kernels for bfloat16")
class TestBfloat16:
    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("rows", [1, 5, 40])
    def test_each_output_is_summed_exactly_and_rounded_once(self, biased: bool, rows: int) -> None:
        weight, x = torch.randn(48, 96).bfloat16(), torch.randn(2, rows, 96).bfloat16()
        bias = torch.randn(48).bfloat16() if biased else None
        got = Bfloat16Linear(weight, bias)(x)
        assert got.dtype == torch.bfloat16
        exact = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        # Half a step of 8 bits; a float32 sum may tip a number beside it.
        assert bool(((got.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-5).all())

    def test_weights_in_blocks_are_one_matrix(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, x = torch.randn(50, 32), torch.randn(3, 32).bfloat16()
        whole = Bfloat16Linear(weight, None)(x)
        monkeypatch.setattr("aparte.model.linear.BLOCK", 20 * 32)
        assert torch.equal(Bfloat16Linear(weight, None)(x), whole)

    def test_rows_that_are_not_contiguous(self) -> None:
        linear, x = Bfloat16Linear(torch.randn(24, 32), None), torch.randn(5, 3, 32).bfloat16()
        assert torch.equal(linear(x[:, 1]), linear(x[:, 1].contiguous()))

    def test_a_cpu_takes_them_for_bfloat16(self, llama_folder: Path) -> None:
        precision = Blueprint.open(llama_folder, Compute("bfloat16", "cpu")).precision
        assert (precision.linears, precision.name) == ("bf16", "bfloat16")
        assert precision.tensor_bytes((48, 96)) == 48 * 96 * 2
