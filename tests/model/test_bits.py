"""Linears of ``bitsandbytes``, on a CPU: the arithmetic is the same on a GPU, and so is the way to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from aparte.config import NF4_BYTES, NF4_GROUP, Compute, Cut
from aparte.device import open_writer
from aparte.errors import UserError
from aparte.measure.verify import Reference, write_split
from aparte.model import bits
from aparte.model.bits import GpuInt8Linear, Nf4Linear, quantise_linears
from aparte.model.checkpoint import Checkpoint
from aparte.model.parts import Blueprint
from aparte.model.precision import Precision
from aparte.speculate.settings import Decoding
from aparte.step import ROOT, Step, chain_parents

CPU = torch.device("cpu")


def by_hand(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Products of integers, which float64 holds exactly, times the scales."""
    of_weight, of_input = (side.float().abs().amax(-1, keepdim=True) / 127 for side in (weight, x))
    inputs, weights = (x.float() / of_input).round().double(), (weight.float() / of_weight).round().double()
    product = inputs @ weights.T * of_weight.double().T * of_input.double()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_8_bits_are_integer_arithmetic(kind: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96), (torch.randn(7, 96) * torch.logspace(-4, 4, 7)[:, None]).to(kind)
    bias = torch.randn(48) if biased else None
    got = GpuInt8Linear(weight, bias, CPU)(x)
    assert got.dtype == kind
    expected = by_hand(weight, bias, x)
    near = 2e-5 if kind == torch.float32 else 0.01
    assert torch.allclose(got.double(), expected, rtol=near, atol=near * float(expected[0].abs().max()))


@pytest.mark.parametrize("rows", [2, 5, 17])
def test_a_row_in_8_bits_is_the_same_alone_and_among_others(rows: int) -> None:
    linear = GpuInt8Linear(torch.randn(64, 96), torch.randn(64), CPU)
    x = torch.randn(1, rows, 96)
    together = linear(x)
    for row in range(rows):
        assert torch.equal(linear(x[:, row : row + 1]), together[:, row : row + 1])


def test_rows_of_zeros_and_outsized_ones() -> None:
    """The first positions of a text hold activations beyond what half precision could."""
    weight = torch.randn(16, 32)
    weight[3] = 0
    linear = GpuInt8Linear(weight, None, CPU)
    assert torch.equal(linear(torch.zeros(2, 32)), torch.zeros(2, 16))
    large = linear(torch.full((1, 32), 1e6))
    assert torch.isfinite(large).all()
    assert float(large[0, 3]) == 0


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_4_bits_multiply_by_the_rounded_weights(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = (
        torch.randn(80, 128),
        torch.randn(80),
        torch.randn(5, 128).to(kind),
    )
    linear = Nf4Linear(weight, bias, CPU)
    rounded = bits.library().functional.dequantize_4bit(linear._weight, linear._state)
    assert 0 < float((rounded - weight).norm() / weight.norm()) < 0.12
    got, expected = linear(x), x.float() @ rounded.T + bias
    assert got.dtype == kind
    assert torch.allclose(got.float(), expected, atol=1e-4 if kind == torch.float32 else 0.2)
    held = linear._weight.nbytes + linear._state.absmax.nbytes
    assert held == weight.numel() / 2 + 4 * weight.numel() / NF4_GROUP == weight.numel() * NF4_BYTES


def test_every_linear_is_replaced() -> None:
    module = nn.Sequential(nn.Linear(64, 8), nn.Sequential(nn.Linear(64, 4, bias=False)))
    quantise_linears(module, "nf4", CPU)
    assert all(isinstance(child, Nf4Linear) for child in (module[0], module[1][0]))


def logits(
    folder: Path, linears: str, change: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Of three tokens by the whole model; ``change`` is done to the matrices of its layers."""
    blueprint = Blueprint(Checkpoint.open(folder), Precision(torch.float32, linears, CPU))  # type: ignore[arg-type]
    if change is not None:
        blueprint.change = lambda _, tensor: change(tensor) if tensor.ndim == 2 else tensor
    stage = blueprint.stage(range(blueprint.layers))
    head = Blueprint(Checkpoint.open(folder), Precision(torch.float32, "plain", CPU)).ends()[1]
    states = blueprint.embedding()(torch.tensor([5, 9, 200]))
    return head(stage.forward(stage.new_cache(), Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, 3)), states))


def test_a_model_in_8_bits_is_near_the_same_in_float32(llama_folder: Path) -> None:
    exact, got = logits(llama_folder, "plain"), logits(llama_folder, "bits8")
    assert 0 < float((got - exact).norm() / exact.norm()) < 0.05


def test_a_model_in_4_bits_is_the_model_of_the_rounded_weights(llama_folder: Path) -> None:
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        linear = Nf4Linear(weight.float(), None, CPU)
        restored: torch.Tensor = bits.library().functional.dequantize_4bit(linear._weight, linear._state)
        return restored

    expected, got = logits(llama_folder, "plain", rounded), logits(llama_folder, "bits4")
    assert float((got - expected).norm() / expected.norm()) < 1e-3
    assert float((got - logits(llama_folder, "plain")).norm() / expected.norm()) > 0.05


def test_a_split_model_in_4_bits_writes_what_the_unsplit_one_writes(llama_folder: Path) -> None:
    compute = Compute("nf4", "cpu")
    blueprint = Blueprint.open(llama_folder, compute)
    assert blueprint.precision.name == "nf4"
    writer = open_writer(blueprint, "tiny", Cut(1, 2), wire="float32")
    prompt = writer.codec.encode("the cat sat on the mat and the dog sat on the log")
    unsplit = Reference(blueprint, writer.codec.eos).write(prompt, 24)
    for decode in ("sequential", "auto"):
        assert write_split(writer, prompt, Decoding(decode), 24).tokens == unsplit.tokens


def test_no_code_comes_from_the_hub(tmp_path: Path) -> None:
    """The library would import this package on some processors, and fetch a kernel with it."""
    (tmp_path / "kernels.py").write_text("import sys; sys.exit('fetched')", encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from aparte.model.bits import library; library();"
        "assert 'kernels' not in sys.modules; print('fine')"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr
    assert ran.stderr == ""


def test_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    bits.library.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"aparte\[bits\]"):
        Precision.resolve(Compute("nf4", "cpu"))
    bits.library.cache_clear()


def test_a_device_that_the_library_does_not_know() -> None:
    with pytest.raises(UserError, match="CPU or a CUDA device"):
        Precision.resolve(Compute("nf4", "mps"))
