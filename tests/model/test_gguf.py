"""GGUF: a converted file is the model it was written from."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer

from aparte.errors import CheckpointError
from aparte.model import gguf as conversion
from aparte.model.checkpoint import INDEX, WEIGHTS, Checkpoint
from aparte.model.gguf import convert, is_gguf
from aparte.model.gguf_config import model_config
from aparte.model.gguf_file import GgufFile
from tiny import FAMILIES, tiny_model, tiny_tokenizer
from tiny_gguf import save_tiny_gguf

PROMPT = "The quick brown fox: for i in range(123): print(i)"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))


def _logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([tiny_tokenizer()(PROMPT).input_ids])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits
    return logits


def _config(path: Path) -> Any:
    return model_config(GgufFile(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    """With the embedding as LM head where the family usually has another, and the other way round."""
    tied = family != "llama"
    folder = convert(save_tiny_gguf(family, tmp_path / "m.gguf", tied=tied, layers=3))
    converted = AutoModelForCausalLM.from_pretrained(folder)
    assert converted.config.model_type == family
    assert converted.config.dtype == torch.float32
    assert torch.equal(_logits(converted), _logits(tiny_model(family, tied=tied, layers=3)))


def test_attention_biases_of_llama_are_reordered_too(tmp_path: Path) -> None:
    settings = {"attention_bias": True, "mlp_bias": True, "layers": 3}
    folder = convert(save_tiny_gguf("llama", tmp_path / "m.gguf", **settings))
    converted = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(_logits(converted), _logits(tiny_model("llama", **settings)))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_precision_is_kept(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = convert(save_tiny_gguf("llama", tmp_path / "m.gguf", kind=kind, layers=3))
    checkpoint = Checkpoint.open(folder)
    names = ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
    weight, norm = checkpoint.read(names).values()
    state = tiny_model("llama", layers=3).state_dict()
    assert torch.equal(weight, state[names[0]].to(dtype))
    assert torch.equal(norm, state[names[1]])
    assert checkpoint.config_dict["dtype"] == str(dtype).removeprefix("torch.")


def test_quantized_tensors_become_float32(tmp_path: Path) -> None:
    folder = convert(save_tiny_gguf("qwen3", tmp_path / "m.gguf", kind="Q8_0", layers=3))
    state = tiny_model("qwen3", layers=3).state_dict()
    checkpoint = Checkpoint.open(folder)
    for name, weight in checkpoint.read(checkpoint.names()).items():
        assert weight.dtype == torch.float32
        assert (weight - state[name]).abs().max() <= state[name].abs().max() / 127


def test_the_tokenizer_is_kept(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(convert(save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)))
    ours = tiny_tokenizer()
    text = "<|im_start|>user\nhé 世界, the thing\n  x = 12<|im_end|>"
    assert tokenizer(text).input_ids == ours(text).input_ids
    assert tokenizer.decode(ours(text).input_ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == ours.apply_chat_template(
        chat, tokenize=False
    )


def test_digits_are_split_where_the_vocabulary_was_learned_so(tmp_path: Path) -> None:
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3, metadata={"tokenizer.ggml.pre": "smollm"})
    backend = AutoTokenizer.from_pretrained(convert(path)).backend_tokenizer
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  12")]
    assert pieces == ["a", "ĠĠ", "1", "2"]


def test_every_end_token_is_kept(tmp_path: Path) -> None:
    path = save_tiny_gguf(
        "llama", tmp_path / "m.gguf", layers=3, metadata={"tokenizer.ggml.eot_token_id": 297}
    )
    folder = convert(path)
    assert Checkpoint.open(folder).config_dict["eos_token_id"] == [299, 297]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [299, 297]


class TestConfig:
    def test_mistral_is_told_by_its_name(self, tmp_path: Path) -> None:
        path = save_tiny_gguf(
            "llama", tmp_path / "m.gguf", metadata={"general.name": "Mistral 7B Instruct v0.3"}
        )
        config = _config(path)
        assert (config.model_type, config.sliding_window) == ("mistral", None)

    def test_mistral_keeps_its_window(self, tmp_path: Path) -> None:
        assert _config(save_tiny_gguf("mistral", tmp_path / "m.gguf")).sliding_window == 8

    def test_head_size_need_not_be_hidden_over_heads(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("qwen3", tmp_path / "m.gguf", head_dim=16)
        assert _config(path).head_dim == 16

    def test_yarn(self, tmp_path: Path) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
        keys = {f"qwen2.rope.scaling.{key}": value for key, value in scaling.items()}
        rope = _config(save_tiny_gguf("qwen2", tmp_path / "m.gguf", metadata=keys)).rope_parameters
        assert rope == {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }

    def test_llama3_rotary_factors_become_settings(self, tmp_path: Path) -> None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = tiny_model("llama", head_dim=64, rope_parameters=rope).config
        stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
        path = save_tiny_gguf(
            "llama",
            tmp_path / "m.gguf",
            head_dim=64,
            rope_parameters=rope,
            metadata={"llama.attention.key_length": 64},
            extra={"rope_freqs.weight": (plain / stretched).numpy().astype(np.float32)},
        )
        assert _config(path).rope_parameters == rope

    def test_other_rotary_factors_are_refused(self, tmp_path: Path) -> None:
        factors = np.array([1, 2, 3, 9], np.float32)
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
        with pytest.raises(CheckpointError, match=r"m\.gguf has rotary factors .* safetensors"):
            _config(path)


class TestCache:
    def test_a_file_is_converted_once(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        steps: list[tuple[str, int, int]] = []
        first = convert(path, lambda *step: steps.append(step))
        assert (f"Converting {path.name}", 0, 0) in steps
        assert any(done == total > 0 for _, done, total in steps)
        steps.clear()
        assert convert(path, lambda *step: steps.append(step)) == first
        assert steps == []

    def test_a_file_that_changed_is_converted_again(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        first = convert(path)
        save_tiny_gguf("llama", path, layers=3, seed=1)
        os.utime(path, ns=(1, 1))
        assert convert(path) != first

    def test_what_a_stopped_process_left_is_replaced(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        folder = tmp_path / "made" / "model"
        (folder.parent / ".model.partial").mkdir(parents=True)
        (folder.parent / ".model.partial" / WEIGHTS).write_text("half")
        folder.mkdir()
        assert Checkpoint.open(convert(path, folder=folder)).names()
        assert not (folder.parent / ".model.partial").exists()

    def test_a_failed_conversion_leaves_nothing(self, tmp_path: Path) -> None:
        path = save_tiny_gguf(
            "llama", tmp_path / "m.gguf", layers=3, metadata={"tokenizer.ggml.model": "odd"}
        )
        with pytest.raises(CheckpointError, match="tokenizer"):
            convert(path, folder=tmp_path / "made" / "model")
        assert [entry.name for entry in (tmp_path / "made").iterdir()] in ([], [".model.lock"])

    def test_two_processes_make_one_folder(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        context = multiprocessing.get_context("fork")
        racers = [context.Process(target=convert, args=(path,)) for _ in range(2)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(60)
        assert [racer.exitcode for racer in racers] == [0, 0]
        made = [entry for entry in conversion.converted_dir().iterdir() if entry.is_dir()]
        assert len(made) == 1
        assert Checkpoint.open(made[0]).names()

    def test_large_models_are_written_in_shards(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(conversion, "_SHARD_BYTES", 20_000)
        folder = convert(save_tiny_gguf("qwen2", tmp_path / "m.gguf", layers=3))
        files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        assert len(files) > 3
        assert files == {file.name for file in folder.glob("*.safetensors")}
        converted = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(_logits(converted), _logits(tiny_model("qwen2", layers=3)))


class TestBadFiles:
    """Every message names the file and a next step."""

    def refused(self, path: Path, *words: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            convert(path)
        for word in (path.name, *words):
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("keep", [0, 3, 20, 1000, 20_000, -1])
    def test_truncated(self, keep: int, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        # llama.cpp pads the last tensor to the alignment, so cut into the tensor itself.
        path.write_bytes(path.read_bytes()[:keep] if keep >= 0 else path.read_bytes()[:-100])
        self.refused(path, "not a usable GGUF file", "Download or copy it again.")

    @pytest.mark.parametrize("place", [8, 16, 24, 200])
    def test_a_length_that_lies(self, place: int, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        data = bytearray(path.read_bytes())
        data[place : place + 8] = struct.pack("<Q", 2**60)
        path.write_bytes(data)
        self.refused(path, "not a usable GGUF file", "Download or copy it again.")

    def test_not_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(b"PK\x03\x04" + b"x" * 100)
        self.refused(path, "does not begin with GGUF", "Download or copy it again.")

    def test_missing(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "m.gguf", "Check the path.")

    @pytest.mark.parametrize(
        "key", ["llama.block_count", "llama.embedding_length", "llama.context_length", "tokenizer.ggml.model"]
    )
    def test_a_key_that_is_missing(self, key: str, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3, metadata={key: None})
        self.refused(path, key, "Download or copy it again.")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("block_count", 9),
            ("embedding_length", 64),
            ("attention.head_count", 5),
            ("feed_forward_length", 0),
        ],
    )
    def test_metadata_that_does_not_fit_the_tensors(self, key: str, value: int, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3, metadata={f"llama.{key}": value})
        self.refused(path, "Download or copy it again.")

    def test_a_tensor_that_the_architecture_lacks(self, tmp_path: Path) -> None:
        extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3, extra=extra)
        self.refused(path, "blk.0.attn_sinks.weight", "Use the model as safetensors.")

    def test_a_layer_that_is_not_counted(self, tmp_path: Path) -> None:
        keys = {"llama.block_count": 2}
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3, metadata=keys)
        self.refused(path, "blk.2.", "Use the model as safetensors.")

    def test_another_architecture(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
        self.refused(path, "'mamba'", "Supported: llama, qwen2, qwen3")

    def test_one_part_of_several(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3, metadata={"split.count": 3})
        self.refused(path, "one of 3 parts", "llama-gguf-split --merge")

    def test_a_number_format_without_a_conversion(self, tmp_path: Path) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", kind="F16", layers=3)
        data = bytearray(path.read_bytes())
        name = b"blk.0.ffn_up.weight"
        place = data.index(name) + len(name) + 4 + 2 * 8  # after its two dimensions
        data[place : place + 4] = struct.pack("<I", GGMLQuantizationType.I16)
        path.write_bytes(data)
        self.refused(path, "quantized as I16", "Use another quantization")

    def test_a_disk_that_is_too_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
        self.refused(path, "0.0 GB free", "APARTE_CACHE")

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = save_tiny_gguf("llama", tmp_path / "m.gguf", layers=3)
        monkeypatch.setenv("APARTE_CACHE", str(path / "below-a-file"))
        self.refused(path, "cannot be written", "set APARTE_CACHE")

    def test_a_partly_rotated_head(self, tmp_path: Path) -> None:
        path = save_tiny_gguf(
            "llama", tmp_path / "m.gguf", layers=3, metadata={"llama.rope.dimension_count": 4}
        )
        self.refused(path, "rotates 4 of 8", "Use the model as safetensors.")


def test_is_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b").write_bytes(b"GGUF...")
    (tmp_path / "c.safetensors").write_bytes(b"x" * 9)
    assert [is_gguf(tmp_path / name) for name in ("a.gguf", "b", "c.safetensors", "d")] == [
        True,
        True,
        False,
        False,
    ]
