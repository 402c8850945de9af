"""What loading a part takes: close to its tensors, and no more at the peak."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from aparte.cli.bench import bench_app
from aparte.config import DEFAULT_MODEL, Compute, Cut
from aparte.errors import CheckpointError, UserError
from aparte.measure import memory
from aparte.model.linear import bf16_available, packed_available, tiles_available
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
needs_packed = pytest.mark.skipif(not packed_available(), reason="this CPU has no packed kernels")
needs_bf16 = pytest.mark.skipif(not bf16_available(), reason="this CPU has no kernels for bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB of float32: large enough that a few layers too many show."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("medium")
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        pytest.param("packed16", 0, marks=needs_packed),
        # Code that oneDNN writes by shape, of the same size for a model of any.
        pytest.param("bfloat16", 10e6, marks=needs_bf16),
    ],
)
def test_loading_peaks_at_the_size_of_the_part(folder: Path, dtype: str, kernels: float) -> None:
    loaded = memory.measure(folder, Cut(1, 1), "middle", Compute(dtype, "cpu")).to_dict()  # type: ignore[arg-type]
    assert loaded["tensors"] > 30e6
    most = 1.15 + kernels / loaded["tensors"]
    assert 0.9 < loaded["held_over_tensors"] <= loaded["peak_over_tensors"] < most, loaded


@pytest.mark.slow
@needs_packed
@pytest.mark.parametrize("dtype", ["packed16", "int8", pytest.param("bfloat16", marks=needs_bf16)])
@pytest.mark.parametrize("part", ["front-back", "middle"])
def test_loading_the_default_model(part: str, dtype: str) -> None:
    folder = resolve(DEFAULT_MODEL)
    loaded = memory.measure(folder, Cut(2, 2), part, Compute(dtype, "cpu")).to_dict()  # type: ignore[arg-type]
    # With AVX-512 8-bit matrices are laid out so that much of their padding lies in pages nobody touches.
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    untouched = dtype == "int8" and avx512 and not tiles_available()
    least = 0.8 if untouched else 0.9
    # Code that oneDNN writes for tiles, of the same size for a model of any.
    most = 1.15 + (10e6 / loaded["tensors"] if dtype == "int8" and tiles_available() else 0)
    assert least < loaded["held_over_tensors"] <= loaded["peak_over_tensors"] < most, loaded


def test_sizes_are_those_of_the_tensors(folder: Path) -> None:
    def size(dtype: str, part: str) -> int:
        blueprint = Blueprint.open(folder, Compute(dtype, "cpu"))  # type: ignore[arg-type]
        return memory.tensor_bytes(blueprint, Cut(1, 2), part)

    model = AutoModelForCausalLM.from_pretrained(folder)
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    table = model.model.embed_tokens.weight.numel()
    assert size("float32", "middle") == 9 * layer * 4
    assert size("float32", "whole") == (12 * layer + 2 * table) * 4  # tied, and held as table and as head
    assert size("bfloat16", "front-back") == (3 * layer + 2 * table) * 2
    if packed_available():
        inputs = {384: 384 + 2 * 128 + 384 + 2 * 1024, 1024: 384}  # outputs by inputs of a layer's matrices
        padded = 512 * inputs[384] + 1024 * inputs[1024]
        norms = 2 * 384 * 4
        assert size("packed16", "middle") == 9 * (2 * padded + norms)
        if tiles_available():  # both widths are whole tiles
            whole = 384 * inputs[384] + 1024 * inputs[1024]
            assert size("int8", "middle") == 9 * (whole + 12 * sum(inputs.values()) + norms)
        else:
            assert size("int8", "middle") == 9 * (padded + 4 * sum(inputs.values()) + norms)


def test_errors_come_through(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        memory.measure(tmp_path, Cut(1, 1), "middle", Compute("float32", "cpu"))


def test_the_command(folder: Path) -> None:
    runner = CliRunner()
    arguments = ["memory", str(folder), "--cut", "1,1", "--part", "front-back", "--dtype", "bfloat16"]
    result = runner.invoke(bench_app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["part"], row["dtype"]) == ("front-back", "bfloat16")
    assert row["peak"] >= row["held"] > row["runtime"] + 10e6
    wrong = runner.invoke(bench_app, ["memory", str(folder), "--part", "head"])
    assert isinstance(wrong.exception, UserError)
