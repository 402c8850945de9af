"""Two sides find out whether they mean the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from aparte.config import Cut
from aparte.errors import MismatchError
from aparte.fingerprint import Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from running import FLOAT32
from tiny import save_tiny

OURS = Fingerprint(
    "ours", "2,2", config="a" * 32, tensors="b" * 32, revision="c" * 40, manifest="sha256:" + "d" * 64
)


def test_the_same_model_passes_whatever_it_is_called() -> None:
    OURS.check(replace(OURS, name="theirs"))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"cut": "4,4"}, "--cut 4,4 or --cut 2,2"),
        ({"config": "x" * 32}, "different architectures"),
        ({"tensors": "x" * 32}, "different weights"),
        ({"tensors": "", "revision": "x" * 40}, "same revision"),
        ({"manifest": "sha256:" + "x" * 64}, "another manifest"),
    ],
)
def test_a_difference_is_named(change: dict[str, str], cause: str) -> None:
    with pytest.raises(MismatchError, match=cause):
        OURS.check(replace(OURS, **change))


@pytest.mark.parametrize(("ours", "theirs"), [("2,2", "whole"), ("whole", "2,2")])
def test_split_and_draft_mode_are_told_which_command_fits(ours: str, theirs: str) -> None:
    with pytest.raises(MismatchError) as caught:
        replace(OURS, cut=ours).check(replace(OURS, cut=theirs))
    assert "aparte serve MODEL --cut 2,2" in str(caught.value)
    assert "aparte serve MODEL --whole" in str(caught.value)
    assert "the cloud sees the text" in str(caught.value)


def test_of_a_whole_model_the_ends_count_too(llama_folder: Path, tmp_path: Path) -> None:
    taken = take_fingerprint(Blueprint.open(llama_folder, FLOAT32), None, "tiny")
    assert taken.cut == "whole"
    file = save_tiny("llama", tmp_path / "other") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    blueprint = Blueprint.open(file.parent, FLOAT32)
    with pytest.raises(MismatchError, match="different weights"):
        taken.check(take_fingerprint(blueprint, None, "other"))
    middle = take_fingerprint(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny")
    middle.check(take_fingerprint(blueprint, Cut(), "other"))  # which split mode does not look at


def test_a_vocabulary_of_another_size_is_another_model_when_the_ends_are_served(
    llama_folder: Path, tmp_path: Path
) -> None:
    taken = take_fingerprint(Blueprint.open(llama_folder, FLOAT32), None, "tiny")
    padded = Blueprint.open(save_tiny("llama", tmp_path / "padded", vocab_size=320), FLOAT32)
    with pytest.raises(MismatchError, match="different architectures"):
        taken.check(take_fingerprint(padded, None, "padded"))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_without_weights_what_is_left_is_compared(
    tiny_folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    folder = tiny_folders[family]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    bare = take_fingerprint(Blueprint.open(tmp_path, FLOAT32, weightless=True), None, "bare")
    assert bare.tensors == ""
    bare.check(take_fingerprint(Blueprint.open(folder, FLOAT32), None, family))


def test_without_the_middle_on_disk_the_revision_decides() -> None:
    OURS.check(replace(OURS, tensors=""))
    OURS.check(replace(OURS, tensors="", revision=""))  # nothing left to compare: a local copy
    OURS.check(replace(OURS, revision="x" * 40))  # equal weights count more than equal commits


@pytest.mark.parametrize("data", [None, [], {}, {"name": 1}, OURS.to_json() | {"name": "x" * 300}])
def test_what_is_no_fingerprint_is_refused(data: object) -> None:
    with pytest.raises(MismatchError, match="same version"):
        Fingerprint.from_json(data)


def test_json_round_trip() -> None:
    assert Fingerprint.from_json(OURS.to_json()) == OURS
    bare = replace(OURS, manifest="")
    assert "manifest" not in bare.to_json()
    assert Fingerprint.from_json(bare.to_json()) == bare
    OURS.check(bare)  # who has no manifest has nothing to compare


def test_no_local_path_is_shown_to_the_other_side(llama_folder: Path) -> None:
    fingerprint = take_fingerprint(Blueprint.open(llama_folder, FLOAT32), Cut(), str(llama_folder))
    assert fingerprint.name == llama_folder.name
    assert not any("/" in value for value in fingerprint.to_json().values())


def test_a_snapshot_of_a_hub_has_a_revision(llama_folder: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / commit).symlink_to(llama_folder)
    blueprint = Blueprint.open(tmp_path / "snapshots" / commit, FLOAT32)
    assert take_fingerprint(blueprint, Cut(), "some/model").revision == commit
