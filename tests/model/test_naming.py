"""Checkpoints keep some tensors under other names, or in other pieces, than the library's models do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aparte.cloud.load import load_engine
from aparte.config import Cut
from aparte.errors import CheckpointError
from aparte.model.needed import layer_index
from aparte.model.parts import Blueprint
from aparte.target.split import DeviceParts
from running import FLOAT32
from tiny import tiny_model

CUT = Cut(1, 1)


@pytest.fixture(params=["mixtral", "qwen3-moe", "gpt-neox"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny_model(request.param, layers=4).save_pretrained(tmp_path)
    return tmp_path


def test_the_parts_read_all_tensors_of_the_checkpoint_and_each_once(folder: Path) -> None:
    cloud, device = (Blueprint.open(folder, FLOAT32) for _ in range(2))
    load_engine(cloud, CUT, "tiny")
    DeviceParts(device, CUT)
    read = [*cloud.checkpoint.tensors_read, *device.checkpoint.tensors_read]
    assert sorted(read) == sorted(cloud.checkpoint.names())
    assert set(cloud.checkpoint.tensors_read) == set(cloud.middle_names(CUT))
    assert {layer_index(name) for name in cloud.middle_names(CUT)} == {1, 2}
    assert set(cloud.all_names()) == cloud.checkpoint.names()


def test_what_is_stored_as_the_model_calls_it_is_taken_as_it_is(tmp_path: Path) -> None:
    """Such as all experts in one tensor."""
    model = tiny_model("qwen3-moe", layers=2)
    model.save_pretrained(tmp_path)
    expected = model.state_dict()
    assert not expected.keys() <= load_file(tmp_path / "model.safetensors").keys()
    in_pieces = Blueprint.open(tmp_path, FLOAT32).stage(range(2))
    save_file({name: value.contiguous() for name, value in expected.items()}, tmp_path / "model.safetensors")
    whole = Blueprint.open(tmp_path, FLOAT32).stage(range(2))
    for left, right in zip(in_pieces._layers.parameters(), whole._layers.parameters(), strict=True):
        assert torch.equal(left, right)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny_model("mixtral", layers=2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.2\.w3\.weight is not in"):
        Blueprint.open(tmp_path, FLOAT32).stage(range(2))
