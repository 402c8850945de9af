"""Two sides find out whether they mean the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aparte.config import Cut
from aparte.errors import MismatchError
from aparte.fingerprint import Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from running import FLOAT32

OURS = Fingerprint("ours", "2,2", config="a" * 32, tensors="b" * 32, revision="c" * 40)


def test_the_same_model_passes_whatever_it_is_called() -> None:
    OURS.check(replace(OURS, name="theirs"))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"cut": "4,4"}, "--cut 4,4 or --cut 2,2"),
        ({"config": "x" * 32}, "different architectures"),
        ({"tensors": "x" * 32}, "different weights"),
        ({"tensors": "", "revision": "x" * 40}, "same revision"),
    ],
)
def test_a_difference_is_named(change: dict[str, str], cause: str) -> None:
    with pytest.raises(MismatchError, match=cause):
        OURS.check(replace(OURS, **change))


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
