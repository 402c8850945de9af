"""Folders in the cache: complete or absent, and made by one process at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from aparte.errors import CheckpointError
from aparte.model import folders


def _fill(folder: Path) -> None:
    (folder / "data").write_text("whole")


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        _fill(folder)

    for _ in range(2):
        assert folders.make(tmp_path / "model", "origin", fill) == tmp_path / "model"
    assert len(calls) == 1
    assert (tmp_path / "model" / "data").read_text() == "whole"
    assert folders.source_of(tmp_path / "model") == "origin"


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        _fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folders.make(tmp_path / "model", "origin", fill)
    assert not any(entry.is_dir() for entry in tmp_path.iterdir())
    assert folders.is_complete(folders.make(tmp_path / "model", "origin", _fill))


def test_an_older_format_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.make(tmp_path / "model", "origin", _fill)
    monkeypatch.setattr(folders, "FORMAT", folders.FORMAT + 1)
    assert not folders.is_complete(tmp_path / "model")
    assert folders.is_complete(folders.make(tmp_path / "model", "origin", _fill))


@pytest.mark.parametrize("manifest", ["", "[]", "{"])
def test_a_damaged_manifest_is_no_manifest(manifest: str, tmp_path: Path) -> None:
    (tmp_path / folders.MANIFEST).write_text(manifest)
    assert folders.source_of(tmp_path) is None


def test_waiting_for_another_is_announced(tmp_path: Path) -> None:
    announced = threading.Event()
    labels: list[str] = []

    def progress(label: str, done: int, total: int) -> None:
        labels.append(label)
        announced.set()

    def slow(folder: Path) -> None:
        started.set()
        assert announced.wait(30)
        _fill(folder)

    started = threading.Event()
    first = threading.Thread(target=folders.make, args=(tmp_path / "model", "origin", slow))
    first.start()
    assert started.wait(30)
    folders.make(tmp_path / "model", "origin", slow, progress)
    first.join()
    assert labels == ["Waiting for another process that prepares model"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written: .* APARTE_CACHE"):
        folders.make(tmp_path / "file" / "model", "origin", _fill)


def test_size_counts_every_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"45")
    assert folders.size_of(tmp_path) == 5
