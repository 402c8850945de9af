"""``aparte shard``, and ``aparte serve`` with what it made."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from aparte.model.linear import packed_available
from cli.command import Command, start


@pytest.fixture
def shard(aparte: Command, llama_folder: Path, tmp_path: Path) -> Path:
    assert aparte("shard", llama_folder, "--cut", "1,3", "--out", tmp_path / "middle").code == 0
    return tmp_path / "middle"


def test_what_was_written_is_told(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    result = aparte("shard", llama_folder, "--cut", "1,3", "--out", tmp_path / "middle")
    assert result.code == 0
    assert "layers 1 to 2 of llama" in result.err
    assert "aparte serve middle --cut 1,3" in result.err
    again = aparte("shard", llama_folder, "--cut", "1,3", "--out", tmp_path / "middle")
    assert again.code == 2
    assert "is there already" in again.err
    other = aparte("shard", llama_folder, "--out", tmp_path / "other", "--json").json
    assert (other["cut"], other["layers"], other["model"]) == ("2,2", 6, "llama")
    assert other["digest"].startswith("sha256:")
    assert aparte("shard", llama_folder, "--cut", "4,4", "--out", tmp_path / "none").code == 2
    assert not (tmp_path / "none").exists()


def test_its_manifest_can_be_shown(aparte: Command, shard: Path, llama_folder: Path) -> None:
    listed = json.loads((shard / "manifest.json").read_text())
    assert aparte("serve", shard, "--show-manifest", "--json").json == listed
    shown = aparte("serve", shard, "--show-manifest").out
    assert listed["digest"] in shown
    assert all(tensor["sha256"] in shown for tensor in listed["tensors"].values())
    refused = aparte("serve", llama_folder, "--show-manifest")
    assert refused.code == 2
    assert "manifest.json" in refused.err


def test_it_is_served_at_its_own_cut(aparte: Command, shard: Path, llama_folder: Path) -> None:
    dtype = "packed16" if packed_available() else "float32"
    child = start("serve", shard, "--port", 0, "--json", "--dtype", dtype)
    assert child.stdout is not None
    ready = json.loads(child.stdout.readline())
    assert ready["cut"] == "1,3"
    assert ready["model"]["manifest"].startswith("sha256:")
    base = ("generate", llama_folder, "the cat", "--max-new-tokens", 4, "--dtype", dtype, "--json")
    there = aparte(*base, "--cloud", ready["listening"], "--cut", "1,3")
    assert there.code == 0, there.err
    assert there.json["text"] == aparte(*base, "--cut", "1,3").json["text"]
    other = aparte(*base, "--cloud", ready["listening"])
    assert other.code == 2
    assert "--cut 1,3 or --cut 2,2" in other.err or "--cut 2,2 or --cut 1,3" in other.err
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 0


def test_mistakes_with_a_shard(aparte: Command, shard: Path) -> None:
    other = aparte("serve", shard, "--cut", "2,1")
    assert other.code == 2
    assert "a shard of llama for cut 1,3" in other.err
    whole = aparte("serve", shard, "--whole")
    assert whole.code == 2
    assert "is a cloud shard" in whole.err
    device = aparte("generate", shard, "hello")
    assert device.code == 2
    assert "Traceback" not in device.err
