"""Private ends on disk: for one model, one cut and one pair of eyes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aparte.bridge.teacher import Teacher
from aparte.config import Cut
from aparte.errors import CheckpointError, MismatchError
from aparte.model.parts import Blueprint
from aparte.privatize.ends import PrivateEnds, Veil
from aparte.privatize.file import load_ends, save_ends
from privatize.conftest import CUT, drawn_ends
from running import FLOAT32
from tiny import save_tiny


def load(path: Path, folder: Path, cut: Cut = CUT) -> PrivateEnds:
    return load_ends(path, Blueprint.open(folder, FLOAT32), cut)


def test_come_back_as_they_were(ends_file: Path, teacher: Teacher, llama_folder: Path) -> None:
    ends, before = load(ends_file, llama_folder), drawn_ends(teacher, llama_folder)
    assert ends.key == before.key
    for name in Veil.__dataclass_fields__:
        assert torch.equal(getattr(ends.veil, name), getattr(before.veil, name)), name
    assert ends.changes.keys() == before.changes.keys()
    assert all(torch.equal(ends.changes[name].delta(), before.changes[name].delta()) for name in ends.changes)
    assert ends.settings == before.settings


def test_nobody_else_may_read_them(ends_file: Path) -> None:
    assert ends_file.stat().st_mode & 0o777 == 0o600


def test_another_cut_is_refused(ends_file: Path, llama_folder: Path) -> None:
    with pytest.raises(MismatchError, match=r"for cut 2,2.*cut 1,3.*--cut 1,3"):
        load(ends_file, llama_folder, Cut(1, 3))


@pytest.mark.parametrize("other", ["weights", "ends"])
def test_another_model_is_refused(ends_file: Path, llama_folder: Path, tmp_path: Path, other: str) -> None:
    """Also one that has the same middle."""
    if other == "weights":
        folder = save_tiny("llama", tmp_path / "other", seed=1)
    else:
        folder = save_tiny("llama", tmp_path / "other")
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if "layers.0.mlp" in name)
        save_file(weights | {name: weights[name] + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="another model"):
        load(ends_file, folder)


@pytest.mark.parametrize(
    "damage", ["cut off", "none", "name", "middle", "size", "number", "key", "veil", "gone"]
)
def test_a_damaged_file_is_a_sentence(
    ends_file: Path, llama_folder: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "ends.safetensors"
    with safe_open(ends_file, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(ends_file)
    up = next(name for name in tensors if name.endswith(".up"))
    if damage == "none":
        header = {"format": "something else"}
    elif damage == "name":
        tensors["nowhere.weight.up"] = tensors.pop(up)
    elif damage == "middle":  # a change of what the cloud holds is none of these ends' business
        tensors[up.replace("layers.0", "layers.3")] = tensors.pop(up)
    elif damage == "size":
        tensors[up] = tensors[up][:-1].contiguous()
    elif damage == "number":
        tensors["veil.table"][0, 0] = torch.nan
    elif damage == "veil":
        tensors["veil.left"] = tensors["veil.left"][:, 1:].contiguous()
    elif damage == "key":
        tensors["key"] = tensors["key"][:5].contiguous()
    if damage != "gone":
        save_file(tensors, path, header)
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="aparte privatize"):
        load(path, llama_folder)


def test_an_interrupted_save_leaves_the_old_file(
    ends_file: Path, teacher: Teacher, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ends.safetensors"
    path.write_bytes(ends_file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_ends(path, drawn_ends(teacher, llama_folder), Blueprint.open(llama_folder, FLOAT32), CUT)
    assert path.read_bytes() == ends_file.read_bytes()
