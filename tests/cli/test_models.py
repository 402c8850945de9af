"""``aparte models`` and ``aparte models get``."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aparte.cli.models import models_app
from aparte.errors import CheckpointError, CutError, UserError
from hub_server import serve_hub
from tiny import save_tiny
from tiny_gguf import save_tiny_gguf


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "aparte"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_listing_as_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(models_app, ["--json"])
    assert result.exit_code == 0
    listing = json.loads(result.stdout)
    assert listing["cache"] == str(tmp_path / "aparte")
    assert listing["models"] == [
        {"name": "smollm2-135m", "source": "embedded", "cached": False, "path": None, "size_bytes": 0}
    ]


def test_listing_as_plain_text() -> None:
    result = CliRunner().invoke(models_app, [])
    assert result.stdout == "smollm2-135m\tembedded\tnot downloaded\t\n"


def test_getting_a_model(tmp_path: Path) -> None:
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
    result = CliRunner().invoke(models_app, ["get", str(path), "--json"])
    assert result.exit_code == 0
    made = json.loads(result.stdout)
    assert made["name"] == str(path)
    assert made["size_bytes"] == sum(file.stat().st_size for file in Path(made["path"]).iterdir())
    assert "Converting m.gguf" in result.stderr
    assert str(path) in CliRunner().invoke(models_app, []).stdout


@pytest.mark.parametrize("part", ["front-back", "middle"])
def test_getting_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Of a checkpoint in many files only those with that part's tensors, and a tokenizer for the device."""
    source = save_tiny("llama", tmp_path / "source", layers=6, max_shard_size="40KB")
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["some/tiny"] = source
        result = CliRunner().invoke(
            models_app, ["get", "some/tiny", "--part", part, "--cut", "1,2", "--json"]
        )
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert (made["part"], made["cut"]) == (part, "1,2")
    weights = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    middle = {f".layers.{layer}." for layer in (1, 2, 3)}
    needed = {
        file for name, file in weights.items() if any(key in name for key in middle) == (part == "middle")
    }
    fetched = {name for name in hub.downloads() if name.endswith(".safetensors")}
    assert fetched == needed
    assert fetched < set(weights.values())
    assert ("tokenizer.json" in hub.downloads()) == (part == "front-back")


def test_parts_of_a_model_that_is_here(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "m", layers=3)
    result = CliRunner().invoke(models_app, ["get", str(path), "--part", "middle", "--cut", "1,1"])
    assert "It is on this machine whole" in result.stderr
    wrong = CliRunner().invoke(models_app, ["get", str(path), "--part", "middle", "--cut", "2,2"])
    assert isinstance(wrong.exception, CutError)
    unknown = CliRunner().invoke(models_app, ["get", str(path), "--part", "half"])
    assert isinstance(unknown.exception, UserError)


def test_a_model_that_does_not_exist() -> None:
    result = CliRunner().invoke(models_app, ["get", "./nope"])
    assert isinstance(result.exception, CheckpointError)
    assert result.stdout == ""


def test_a_terminal_gets_a_table_and_bars(tmp_path: Path) -> None:
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
    code = (
        "import sys; from aparte.cli.models import models_app;"
        f"models_app(['get', {str(path)!r}], standalone_mode=False); models_app([], standalone_mode=False)"
    )
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal's end is told on Linux
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert child.wait(60) == 0
    text = shown.decode()
    assert "Converting m.gguf" in text
    assert "MODEL" in text
    assert "not downloaded" in text


def test_listing_needs_no_heavy_imports() -> None:
    code = (
        "import sys; from aparte.cli.models import models_app; models_app(['--json'], standalone_mode=False);"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
