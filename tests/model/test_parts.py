"""Each side reads its own tensors and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aparte.cloud.load import load_engine
from aparte.config import Compute, Cut
from aparte.errors import CheckpointError, CutError
from aparte.model.fingerprint import take_fingerprint
from aparte.model.linear import PackedLinear, packed_available
from aparte.model.needed import layer_index, needed_by_cloud, needed_by_device, needed_to_draft
from aparte.model.parts import Blueprint
from aparte.target.split import DeviceParts
from running import FLOAT32
from tiny import save_tiny


def test_the_cloud_reads_the_middle_and_nothing_else(tiny_folder: Path) -> None:
    blueprint = Blueprint.open(tiny_folder, FLOAT32)
    cut = Cut(2, 1)
    load_engine(blueprint, cut, "tiny")
    checkpoint = blueprint.checkpoint
    assert {layer_index(name) for name in checkpoint.tensors_read} == set(cut.middle(blueprint.layers))
    assert set(checkpoint.tensors_read) == set(blueprint.middle_names(cut))
    expected = sum(
        torch.Size(checkpoint.shapes()[name][1]).numel() * 4 for name in blueprint.middle_names(cut)
    )
    assert checkpoint.bytes_read == expected


def test_the_device_reads_the_ends_and_nothing_else(tiny_folder: Path) -> None:
    blueprint = Blueprint.open(tiny_folder, FLOAT32)
    cut = Cut(2, 1)
    take_fingerprint(blueprint, cut, "tiny")  # samples the middle's bytes; reads no tensor
    DeviceParts(blueprint, cut)
    read, middle = set(blueprint.checkpoint.tensors_read), set(blueprint.middle_names(cut))
    assert not read & middle
    assert read == set(blueprint.checkpoint.names()) - middle


def test_what_is_fetched_is_what_is_read(tiny_folder: Path) -> None:
    blueprint, cut = Blueprint.open(tiny_folder, FLOAT32), Cut(2, 1)
    middle, names = set(blueprint.middle_names(cut)), blueprint.checkpoint.names()
    cloud, device = needed_by_cloud(cut), needed_by_device(cut)
    assert {name for name in names if cloud(name, blueprint.layers)} == middle
    assert {name for name in names if device(name, blueprint.layers)} == names - middle


def test_tied_embeddings_are_read_once(tmp_path: Path) -> None:
    blueprint = Blueprint.open(save_tiny("llama", tmp_path / "tied", tied=True), FLOAT32)
    assert "lm_head.weight" not in blueprint.checkpoint.names()
    embed, head = blueprint.ends()
    assert blueprint.checkpoint.tensors_read.count("model.embed_tokens.weight") == 1
    assert head(embed(torch.tensor([3]))).shape == (1, blueprint.vocab_size)


@pytest.mark.parametrize(("front", "back"), [(0, 2), (2, 0)])
def test_a_cut_keeps_both_ends(front: int, back: int) -> None:
    with pytest.raises(CutError, match="at least 1"):
        Cut(front, back)


def test_a_cut_leaves_a_middle(llama_folder: Path) -> None:
    layers = Blueprint.open(llama_folder, FLOAT32).layers
    with pytest.raises(CutError, match=f"at most {layers - 1}"):
        Cut(layers - 1, 1).middle(layers)
    assert len(Cut(layers - 2, 1).middle(layers)) == 1


def test_fingerprints_tell_weights_architectures_and_cuts_apart(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    def fingerprint(folder: Path, cut: Cut) -> tuple[str, str, str]:
        taken = take_fingerprint(Blueprint.open(folder, FLOAT32), cut, "any")
        return taken.cut, taken.config, taken.tensors

    llama = fingerprint(tiny_folders["llama"], Cut(2, 2))
    assert llama == fingerprint(tiny_folders["llama"], Cut(2, 2))
    other_weights = fingerprint(save_tiny("llama", tmp_path / "other", seed=1), Cut(2, 2))
    assert other_weights[1] == llama[1]
    assert other_weights[2] != llama[2]
    assert fingerprint(tiny_folders["qwen3"], Cut(2, 2))[1] != llama[1]
    assert fingerprint(tiny_folders["llama"], Cut(1, 2))[2] != llama[2]


@pytest.mark.parametrize(
    ("family", "cause"),
    [("mamba2", "running state"), ("llamarama", "transformers does not know it")],
)
def test_a_family_that_cannot_be_run_is_refused_by_name(
    llama_folder: Path, tmp_path: Path, family: str, cause: str
) -> None:
    config = (llama_folder / "config.json").read_text().replace('"llama"', f'"{family}"')
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes((llama_folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=rf"'{family}'.*{cause}.*Supported: llama"):
        Blueprint.open(tmp_path, FLOAT32)


def test_quantised_weights_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    config = json.loads((llama_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantised \(awq\).*GGUF"):
        Blueprint.open(tmp_path, FLOAT32, weightless=True)


@pytest.mark.skipif(not packed_available(), reason="this CPU has no packed half-precision kernels")
def test_packed_linears_are_half_precision_weights_in_float32_arithmetic() -> None:
    weight, bias, x = torch.randn(48, 32), torch.randn(48), torch.randn(5, 32)
    packed = PackedLinear(weight, bias)
    expected = torch.nn.functional.linear(x, weight.half().float(), bias)
    torch.testing.assert_close(packed(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not packed_available(), reason="this CPU has no packed half-precision kernels")
def test_packed_parts_compute_in_float32(llama_folder: Path) -> None:
    blueprint = Blueprint.open(llama_folder, Compute("packed16", "cpu"))
    embed, head = blueprint.ends()
    logits = head(embed(torch.tensor([1, 2])))
    assert logits.dtype == torch.float32
    assert blueprint.precision.name == "packed16"


def test_a_device_in_draft_mode_needs_what_its_drafters_do() -> None:
    def layers_of(names: tuple[str, ...], shallow: int | None = None) -> list[object]:
        wanted = needed_to_draft(Cut(1, 2), names, shallow)
        tensors = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
        tensors += [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(6)]
        return [layer_index(name) for name in tensors if wanted(name, 6)]

    assert layers_of(("context",)) == layers_of(("context", "model")) == []
    assert layers_of(("bridge", "context")) == [None, None, None, 0, 4, 5]
    assert layers_of(("shallow",), 3) == [None, None, None, 0, 1, 2]
    assert layers_of(("shallow", "bridge"), 2) == [None, None, None, 0, 1, 4, 5]
