"""A bridge on disk belongs to one model at one cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aparte.bridge.file import Bridge, bridge_path, find_bridge, load_bridge, save_bridge
from aparte.bridge.teacher import Teacher
from aparte.config import DEFAULT_MODEL, Cut
from aparte.errors import CheckpointError, MismatchError
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from bridge.conftest import CUT, new_net
from running import FLOAT32
from tiny import save_tiny

IDS = torch.tensor([1, 5, 9])


@pytest.fixture
def saved(teacher: Teacher, llama_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "bridge.safetensors"
    fingerprint = take_fingerprint(Blueprint.open(llama_folder, FLOAT32), CUT, "tiny")
    save_bridge(path, new_net(teacher), IDS, fingerprint)
    return path


def load(path: Path, folder: Path, cut: Cut = CUT) -> Bridge:
    # Joined operations hold the same weights under other names.
    return load_bridge(path, Blueprint.open(folder, FLOAT32, fused=False), cut)


def test_comes_back_as_it_was_in_half_precision(saved: Path, teacher: Teacher, llama_folder: Path) -> None:
    bridge = load(saved, llama_folder)
    assert bridge.draft_ids.tolist() == IDS.tolist()
    for name, value in new_net(teacher).state_dict().items():
        assert torch.allclose(bridge.net.state_dict()[name], value, rtol=1e-3, atol=1e-6), name


def test_another_cut_is_refused(saved: Path, llama_folder: Path) -> None:
    with pytest.raises(MismatchError, match=r"cut 2,2.*cut 1,3.*--cut 1,3"):
        load(saved, llama_folder, Cut(1, 3))


def test_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="another model"):
        load(saved, save_tiny("llama", tmp_path / "other", seed=1))


@pytest.mark.parametrize("damage", ["cut off", "no bridge", "tokens", "tensor", "gone"])
def test_a_damaged_file_is_a_sentence(saved: Path, llama_folder: Path, damage: str) -> None:
    from safetensors import safe_open

    with safe_open(saved, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(saved)
    if damage == "cut off":
        saved.write_bytes(saved.read_bytes()[:200])
    elif damage == "no bridge":
        save_file(tensors, saved, {"format": "something"})
    elif damage == "tokens":
        save_file(tensors | {"draft_ids": torch.tensor([7, 10**6], dtype=torch.int32)}, saved, header)
    elif damage == "tensor":
        del tensors["join.weight"]
        save_file(tensors, saved, header)
    else:
        saved.unlink()
    with pytest.raises(CheckpointError, match="bridge"):
        load(saved, llama_folder)


def test_one_trained_here_comes_before_the_one_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path))
    shipped = find_bridge(DEFAULT_MODEL, Cut())
    assert shipped is not None
    assert shipped.stat().st_size <= 15e6
    assert find_bridge(DEFAULT_MODEL, Cut(3, 3)) is None
    assert find_bridge("another", Cut()) is None
    own = bridge_path(DEFAULT_MODEL, Cut())
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_bridge(DEFAULT_MODEL, Cut()) == own
