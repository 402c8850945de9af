"""``aparte bridge train`` from beginning to end, and what the other commands make of its bridge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aparte.bridge.file import bridge_path
from aparte.bridge.train import Trainer
from aparte.cli.setup import connect, load_models
from aparte.config import DEFAULT_MODEL, Compute
from aparte.connection import Connection
from aparte.speculate.settings import Decoding
from bridge.conftest import CUT
from cli.command import Command

FEW = ("--tokens", 1000, "--steps", 2)
EXACT = ("--dtype", "float32", "--wire", "float32", "--max-new-tokens", 24, "--json")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))


def test_a_trained_bridge_is_found_and_changes_no_text(aparte: Command, llama_folder: Path) -> None:
    trained = aparte("bridge", "train", llama_folder, *FEW, "--json")
    assert trained.code == 0, trained.err
    path = Path(trained.json["bridge"])
    assert path == bridge_path(str(llama_folder), CUT)
    assert [line["step"] for line in trained.json["reports"]] == [2]
    assert trained.json["reports"][0]["loss"] > 0
    assert not (path.parent / "work" / path.stem).exists()  # cleared up

    base = ("generate", llama_folder, "the cat and the dog", *EXACT)
    expected = aparte(*base, "--decode", "sequential").json["token_ids"]
    for mode in ("bridge", "auto"):
        assert aparte(*base, "--decode", mode).json["token_ids"] == expected
    connection = Connection(str(llama_folder), CUT, compute=Compute("float32"))
    with connect(connection, quiet=True) as writer:
        assert set(load_models(Decoding(), connection, writer)) == {"bridge"}

    path.write_bytes(b"broken")  # `auto` does without and says so; by name it is an error
    result = aparte("generate", llama_folder, "the cat and the dog", *EXACT, "--decode", "auto")
    assert result.json["token_ids"] == expected
    assert "Drafting without a bridge." in result.err
    assert aparte(*base, "--decode", "bridge").code == 2


def test_an_interrupted_run_goes_on_and_keeps_what_is_asked_to_be_kept(
    aparte: Command, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, out = tmp_path / "work", tmp_path / "out.safetensors"
    command = ("bridge", "train", llama_folder, *FEW, "--work", work, "--out", out, "--keep")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert aparte(*command).code == 130
    shards = {path: path.stat().st_mtime_ns for path in (work / "conversations").iterdir()}
    assert shards
    other = aparte(*command, "--seed", 5)
    assert other.code == 2
    assert "other settings" in other.err
    assert aparte(*command).code == 0
    assert out.exists()
    assert {path: path.stat().st_mtime_ns for path in (work / "conversations").iterdir()} == shards


def test_training_goes_on_from_a_bridge_with_texts_of_ones_own(
    aparte: Command, llama_folder: Path, tmp_path: Path
) -> None:
    first, second, text = tmp_path / "first.safetensors", tmp_path / "second.safetensors", tmp_path / "t.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log " * 20, encoding="utf-8")
    train = ("bridge", "train", llama_folder, *FEW, "--work", tmp_path / "work", "--json")
    assert aparte(*train, "--out", first).code == 0
    further = (*train, "--out", second, "--from", first, "--text", text)
    result = aparte(*further, "--keep")
    assert result.code == 0, result.err
    before, after = (load_file(path) for path in (first, second))
    assert torch.equal(before["draft_ids"], after["draft_ids"])
    # Two careful steps from where the first one ended.
    moved, size = (
        (before["join.weight"] - after["join.weight"]).float().norm(),
        before["join.weight"].float().norm(),
    )
    assert 0 < moved < 0.05 * size
    text.write_text("another text, with the cat and the dog on the log and the mat " * 20, encoding="utf-8")
    other = aparte(*further)
    assert other.code == 2
    assert "other settings" in other.err


def test_what_training_can_begin_with(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    train = ("bridge", "train", llama_folder, *FEW)
    for start, says in (("shipped", "No bridge ships"), (tmp_path / "none", "can't be read as a bridge")):
        result = aparte(*train, "--from", start)
        assert result.code == 2
        assert says in result.err


def test_no_bridge_is_an_error_by_name_only(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", *EXACT)
    assert aparte(*base, "--decode", "auto").code == 0
    result = aparte(*base, "--decode", "bridge")
    assert result.code == 2
    assert "aparte bridge train" in result.err


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_drafts_with_what_ships(default_model: Path) -> None:
    connection = Connection(DEFAULT_MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APARTE_CACHE", str(default_model.parent.parent))
        with connect(connection, quiet=True) as writer:
            assert set(load_models(Decoding(), connection, writer)) == {"common", "bridge"}
            assert not load_models(Decoding("sequential"), connection, writer)
