"""Checkpoint: reads exactly what it is asked for, and says what is wrong with a bad folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aparte.errors import CheckpointError
from aparte.model.checkpoint import CONFIG, INDEX, WEIGHTS, Checkpoint
from tiny import save_tiny, tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_tiny("qwen2", root / "single")
    save_tiny("qwen2", root / "sharded", max_shard_size="20KB")
    return root


@pytest.fixture
def single(models: Path, tmp_path: Path) -> Path:
    return _copy(models / "single", tmp_path / "copy")


@pytest.fixture
def sharded(models: Path, tmp_path: Path) -> Path:
    return _copy(models / "sharded", tmp_path / "copy")


def _copy(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _layer(index: int, names: frozenset[str]) -> list[str]:
    return sorted(name for name in names if f".layers.{index}." in name)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_reads_only_what_is_asked_for(models: Path, layout: str) -> None:
    checkpoint = Checkpoint.open(models / layout)
    state = tiny_model("qwen2").state_dict()
    assert checkpoint.names() == frozenset(state)
    assert checkpoint.config_dict["model_type"] == "qwen2"

    names = _layer(3, checkpoint.names())
    tensors = checkpoint.read(names)

    assert list(tensors) == names
    assert all(torch.equal(tensors[name], state[name]) for name in names)
    assert checkpoint.tensors_read == names
    assert checkpoint.bytes_read == sum(state[name].nbytes for name in names)


def test_the_ledger_adds_up_over_reads(models: Path) -> None:
    checkpoint = Checkpoint.open(models / "single")
    checkpoint.read(["model.norm.weight"])
    checkpoint.read(["model.norm.weight", "lm_head.weight"])
    assert checkpoint.tensors_read == ["model.norm.weight", "model.norm.weight", "lm_head.weight"]
    assert checkpoint.bytes_read == (32 + 32 + 300 * 32) * 4


def test_shapes_come_from_headers(models: Path) -> None:
    checkpoint = Checkpoint.open(models / "sharded")
    shapes = checkpoint.shapes()
    assert shapes["model.embed_tokens.weight"] == ("F32", (300, 32))
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == ("F32", (16,))
    assert checkpoint.bytes_read == 0


def test_half_precision_keeps_its_type(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, layers=3)
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS)
    (read,) = Checkpoint.open(folder).read(["model.norm.weight"]).values()
    assert read.dtype == torch.bfloat16


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_tiny("llama", tmp_path, layers=3))
    assert checkpoint.config_dict["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.names()


def test_a_shard_that_is_not_needed_may_be_absent(sharded: Path) -> None:
    files = json.loads((sharded / INDEX).read_text())["weight_map"]
    names = _layer(2, frozenset(files))
    for file in set(files.values()) - {files[name] for name in names}:
        (sharded / file).unlink()
    checkpoint = Checkpoint.open(sharded)
    assert set(checkpoint.read(names)) == set(names)
    assert set(names) <= set(checkpoint.shapes()) < checkpoint.names()


class TestSample:
    def test_does_not_depend_on_layout_or_order(self, models: Path) -> None:
        single, sharded = Checkpoint.open(models / "single"), Checkpoint.open(models / "sharded")
        names = sorted(single.names())
        assert single.sample(names) == sharded.sample(reversed(names))
        assert single.bytes_read == 0

    def test_reads_a_bounded_number_of_bytes(self, models: Path) -> None:
        checkpoint = Checkpoint.open(models / "single")
        checkpoint.sample(["model.embed_tokens.weight"], bytes_per_tensor=1024)
        assert checkpoint.bytes_sampled == 1024
        checkpoint.sample(["model.norm.weight"], bytes_per_tensor=1024)
        assert checkpoint.bytes_sampled == 1024 + 32 * 4

    def test_tells_other_weights_apart(self, single: Path) -> None:
        names = ["model.embed_tokens.weight"]
        before = Checkpoint.open(single).sample(names)
        weights = load_file(single / WEIGHTS)
        weights[names[0]] += 1
        save_file(weights, single / WEIGHTS)
        assert Checkpoint.open(single).sample(names) != before

    def test_sees_the_first_and_the_last_bytes(self, single: Path) -> None:
        names = ["model.embed_tokens.weight"]
        digests = {Checkpoint.open(single).sample(names, 256)}
        for place in (0, -1):
            weights = load_file(single / WEIGHTS)
            weights[names[0]].view(-1)[place] += 1
            save_file(weights, single / WEIGHTS)
            digests.add(Checkpoint.open(single).sample(names, 256))
        assert len(digests) == 3

    def test_a_tensor_whose_file_is_absent(self, sharded: Path) -> None:
        file = json.loads((sharded / INDEX).read_text())["weight_map"]["model.norm.weight"]
        (sharded / file).unlink()
        assert Checkpoint.open(sharded).sample(["model.norm.weight"]) is None

    def test_a_tensor_that_the_model_lacks(self, single: Path) -> None:
        with pytest.raises(CheckpointError, match="again"):
            Checkpoint.open(single).sample(["model.layers.99.x"])


def _read_all(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.read(checkpoint.names())


def _edit_header(path: Path, **changes: object) -> None:
    """Change what a safetensors header says of ``model.norm.weight``, leaving the data as it is."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"].update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


class TestBadFiles:
    """Every message names the file and a next step."""

    def refused(self, folder: Path, *words: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            _read_all(folder)
        message = str(caught.value)
        for word in words:
            assert word in message
        assert "\n" not in message

    @pytest.mark.parametrize("keep", [0, 5, 40, 2000, -1])
    def test_truncated_weights(self, single: Path, keep: int) -> None:
        data = (single / WEIGHTS).read_bytes()
        (single / WEIGHTS).write_bytes(data[:keep])
        self.refused(single, str(single / WEIGHTS), "damaged or incomplete", "Download or copy it again.")

    def test_more_bytes_than_the_header_says(self, single: Path) -> None:
        with (single / WEIGHTS).open("ab") as file:
            file.write(b"\0" * 10)
        self.refused(single, str(single / WEIGHTS), "10 bytes at its end", "Download or copy it again.")

    @pytest.mark.parametrize("first", [b"\xff" * 8, b"PK\x03\x04zip!"])
    def test_not_safetensors_at_all(self, single: Path, first: bytes) -> None:
        (single / WEIGHTS).write_bytes(first + b"x" * 500)
        self.refused(single, str(single / WEIGHTS), "does not begin", "Download or copy it again.")

    @pytest.mark.parametrize(
        "changes",
        [
            {"shape": [33]},
            {"shape": [-32]},
            {"shape": ["32"]},
            {"shape": None},
            {"shape": [2**80]},
            {"data_offsets": [0, 128]},
            {"data_offsets": [128, 0]},
            {"data_offsets": [2**62, 2**62 + 128]},
            {"data_offsets": [1.5, 2]},
            {"data_offsets": 7},
        ],
    )
    def test_a_header_that_lies(self, single: Path, changes: dict[str, object]) -> None:
        _edit_header(single / WEIGHTS, **changes)
        self.refused(single, str(single / WEIGHTS), "damaged or incomplete", "Download or copy it again.")

    def test_an_unknown_number_format(self, single: Path) -> None:
        _edit_header(single / WEIGHTS, dtype="F4")
        self.refused(single, str(single / WEIGHTS), "'F4'", "Use a version of the model")

    def test_a_git_lfs_pointer(self, single: Path) -> None:
        (single / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        self.refused(single, str(single / WEIGHTS), "git lfs pull")

    @pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", '{"hidden_size": 3}', "[" * 100_000])
    def test_a_bad_config(self, single: Path, text: str) -> None:
        (single / CONFIG).write_text(text)
        self.refused(single, str(single / CONFIG), "again.")

    @pytest.mark.parametrize("text", ["", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
    def test_a_bad_index(self, sharded: Path, text: str) -> None:
        (sharded / INDEX).write_text(text)
        self.refused(sharded, str(sharded / INDEX), "Download or copy it again.")

    @pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors", "pytorch_model.bin"])
    def test_an_index_that_points_elsewhere(self, sharded: Path, file: str) -> None:
        (sharded / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        self.refused(sharded, str(sharded / INDEX), file, "Download or copy it again.")

    def test_a_missing_shard(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("model-*.safetensors"))[4]
        shard.unlink()
        self.refused(sharded, str(shard), "missing", "run it again")

    def test_a_truncated_shard(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("model-*.safetensors"))[4]
        shard.write_bytes(shard.read_bytes()[:-7])
        self.refused(sharded, str(shard), "cut short", "Download or copy it again.")

    def test_an_index_and_a_shard_that_disagree(self, sharded: Path) -> None:
        first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
        first.write_bytes(second.read_bytes())
        self.refused(sharded, str(first), "download the model again")

    def test_a_tensor_that_the_model_lacks(self, single: Path) -> None:
        with pytest.raises(CheckpointError, match=r"model\.layers\.99\.x is not in .*copy.*again"):
            Checkpoint.open(single).read(["model.layers.99.x"])

    def test_pickled_weights(self, single: Path) -> None:
        (single / WEIGHTS).rename(single / "pytorch_model.bin")
        self.refused(single, "pytorch_model.bin", "pickle", "Get the model as safetensors")

    def test_shards_without_an_index(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        self.refused(sharded, str(sharded), f"Copy {INDEX}")

    def test_no_weights(self, single: Path) -> None:
        (single / WEIGHTS).unlink()
        self.refused(single, str(single), "Download the model again.")

    def test_remote_code(self, single: Path) -> None:
        config = json.loads((single / CONFIG).read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
        (single / CONFIG).write_text(json.dumps(config))
        self.refused(single, str(single / CONFIG), "auto_map", "never", "Use a version")

    def test_no_config(self, single: Path) -> None:
        (single / CONFIG).unlink()
        self.refused(single, str(single), CONFIG, "Give the folder")

    def test_no_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nothing", str(tmp_path / "nothing"), "Check the path.")

    def test_a_file_instead_of_a_folder(self, single: Path) -> None:
        self.refused(single / WEIGHTS, str(single / WEIGHTS), "give the folder")

    def test_a_folder_in_place_of_the_weights(self, single: Path) -> None:
        (single / WEIGHTS).unlink()
        (single / WEIGHTS).mkdir()
        self.refused(single, str(single / WEIGHTS), "Check that it is a file")
