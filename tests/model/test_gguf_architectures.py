"""Every architecture of GGUF that is supported: a file writes what the model that it was made from writes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.config import Cut, Sampling
from aparte.decode import Job, decode
from aparte.errors import CheckpointError
from aparte.model.checkpoint import Checkpoint
from aparte.model.families import FAMILIES
from aparte.model.gguf import convert
from aparte.model.gguf_architectures import ARCHITECTURES
from aparte.model.gguf_config import model_config
from aparte.model.gguf_file import GgufFile
from aparte.model.parts import Blueprint
from aparte.session import Session
from aparte.target.split import DeviceParts, SplitTarget
from drafters import RandomTrees
from running import FLOAT32
from tiny import VARIANTS, tiny_model
from tiny_gguf import ARCHITECTURES as ARCHITECTURE_OF
from tiny_gguf import GGUF_VARIANTS, save_tiny_gguf

CUT = Cut(1, 1)
PROMPT = [(37 * place + 11) % 250 for place in range(14)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))


def settings_of(name: str) -> dict[str, Any]:
    return {"layers": 3, **GGUF_VARIANTS[name]}


def config_of(name: str, path: Path, **settings: Any) -> Any:
    return model_config(GgufFile(save_tiny_gguf(name, path, **{**settings_of(name), **settings})))


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return logits


@pytest.mark.parametrize("name", GGUF_VARIANTS)
def test_a_file_writes_what_its_model_writes(name: str, tmp_path: Path) -> None:
    model: Any = tiny_model(name, **settings_of(name))
    folder = convert(save_tiny_gguf(name, tmp_path / "m.gguf", **settings_of(name)))
    converted = AutoModelForCausalLM.from_pretrained(folder)
    assert converted.config.model_type == model.config.model_type
    # Ones that were taken off a norm and put on again may round; nothing else is touched.
    torch.testing.assert_close(logits_of(converted), logits_of(model), rtol=1e-5, atol=1e-5)
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=9,
        eos_token_id=None,
    )[0, len(PROMPT) :].tolist()
    blueprint = Blueprint.open(folder, FLOAT32)
    link = InProcessLink(load_engine(blueprint, CUT, "tiny"), "float32")
    target = SplitTarget(DeviceParts(blueprint, CUT), link, "float32")
    job = Job(tuple(PROMPT), Sampling(), len(expected), frozenset(), 12)
    blocks = decode(target, Session(), RandomTrees([*PROMPT, *expected], seed=1), job)
    assert [token for block in blocks for token in block.tokens] == expected


def test_every_family_that_is_tested_can_be_a_file() -> None:
    tried = {VARIANTS[name][0] for name in GGUF_VARIANTS}
    assert tried == FAMILIES.keys()
    assert {ARCHITECTURE_OF.get(family, family) for family in tried} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_become_tensors_of_their_own(name: str, tmp_path: Path) -> None:
    """As in the families' checkpoints, so that no more than one is held while converting."""
    path = save_tiny_gguf(name, tmp_path / "m.gguf", kind="Q8_0", **settings_of(name))
    checkpoint = Checkpoint.open(convert(path))
    family = FAMILIES[checkpoint.config_dict["model_type"]]
    model = tiny_model(name, **settings_of(name))
    experts = [tensor for tensor in checkpoint.names() if ".experts." in tensor]
    assert len(experts) == 3 * 3 * model.config.num_experts
    assert {tensor.split(".")[-2] for tensor in experts} == set(family.experts)
    down = model.state_dict()["model.layers.1.mlp.experts.down_proj"]
    for expert, weight in enumerate(down):
        ending = f".experts.{expert}.{family.experts[2]}.weight"
        (own,) = (tensor for tensor in experts if ".layers.1." in tensor and tensor.endswith(ending))
        (read,) = checkpoint.read([own]).values()
        assert (read - weight).abs().max() <= weight.abs().max() / 127


def test_experts_may_be_tensors_of_their_own_in_old_files(tmp_path: Path) -> None:
    import gguf

    new = GgufFile(save_tiny_gguf("mixtral", tmp_path / "new.gguf", **settings_of("mixtral")))
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    for key, value in new.metadata.items():
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        if key != "general.architecture":
            add[type(value)](key, value)
    for tensor in new.tensors.values():
        values = tensor.load().numpy()
        if values.ndim < 3:
            writer.add_tensor(tensor.name, values)
        for expert in range(len(values) if values.ndim == 3 else 0):
            writer.add_tensor(tensor.name.replace("_exps.", f".{expert}."), values[expert].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    converted = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "old.gguf"))
    assert torch.equal(logits_of(converted), logits_of(tiny_model("mixtral", **settings_of("mixtral"))))


class TestConfig:
    def test_the_largest_gemmas_divide_scores_by_another_number(self, tmp_path: Path) -> None:
        """27B of the second generation has 46 layers, of the third 62; no setting says it."""
        for name, largest in (("gemma2", 46), ("gemma3", 62)):
            path = tmp_path / f"{name}.gguf"
            more = {"head_dim": 12, "layers": 3}
            assert config_of(name, path, **more).query_pre_attn_scalar == 12
            file = GgufFile(path)
            file.metadata[f"{name}.block_count"] = largest
            file.tensors |= {f"layer {number}": file.tensors["output_norm.weight"] for number in range(99)}
            assert model_config(file).query_pre_attn_scalar == 8

    def test_what_gemma_files_leave_out(self, tmp_path: Path) -> None:
        left_out = {
            "gemma2.attn_logit_softcapping": None,
            "gemma2.final_logit_softcapping": None,
            "gemma2.attention.sliding_window": None,
        }
        config = config_of("gemma2", tmp_path / "2.gguf", metadata=left_out)
        assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
        assert config.sliding_window == 4096
        assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
        keys = {"gemma3.rope.freq_base_swa": None, "gemma3.attention.sliding_window_pattern": None}
        config = config_of("gemma3", tmp_path / "3.gguf", metadata=keys, layers=7)
        assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
        assert [kind[0] for kind in config.layer_types] == [*"sssssfs"]

    def test_a_gemma_without_windows(self, tmp_path: Path) -> None:
        config = config_of("gemma3", tmp_path / "m.gguf", metadata={"gemma3.attention.sliding_window": 0})
        assert set(config.layer_types) == {"full_attention"}

    def test_longrope_factors_become_settings(self, tmp_path: Path) -> None:
        rope = config_of("phi3-longrope", tmp_path / "m.gguf").rope_parameters
        ours = tiny_model("phi3-longrope", layers=1).config.rope_parameters
        assert rope["short_factor"] == pytest.approx(ours["short_factor"])
        assert rope["long_factor"] == pytest.approx(ours["long_factor"])
        assert rope["original_max_position_embeddings"] == 128
        assert "attention_factor" not in rope  # as follows from the lengths, in double precision
        keys = {"phi3.rope.scaling.attn_factor": 1.5}
        rope = config_of("phi3-longrope", tmp_path / "n.gguf", metadata=keys).rope_parameters
        assert rope["attention_factor"] == 1.5

    @pytest.mark.parametrize("name", ["phi3", "gpt-neox"])
    def test_a_part_of_each_head_may_rotate(self, name: str, tmp_path: Path) -> None:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
        assert config_of(name, tmp_path / "m.gguf", rope_parameters=rope).rope_parameters == rope

    def test_a_share_of_the_head_does_not_lose_a_dimension(self) -> None:
        from aparte.model.gguf_architectures import Settings
        from aparte.model.gguf_rope import parameters

        for head_dim in range(2, 300, 2):
            for rotated in range(2, head_dim, 2):
                file: Any = SimpleNamespace(metadata={"phi3.rope.dimension_count": rotated}, tensors={})
                rope = parameters(Settings(file, "phi3"), head_dim, partly=True)
                assert int(head_dim * rope["partial_rotary_factor"]) == rotated

    def test_what_granite_files_leave_out(self, tmp_path: Path) -> None:
        left_out = {
            f"granite.{key}": None for key in ("attention.scale", "embedding_scale", "residual_scale")
        }
        config = config_of("granite", tmp_path / "m.gguf", metadata=left_out)
        assert (config.embedding_multiplier, config.residual_multiplier) == (1.0, 1.0)
        assert config.attention_multiplier == 8**-0.5

    def test_yarn_keeps_its_details(self, tmp_path: Path) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0}
        keys = {f"olmo2.rope.scaling.{key}": value for key, value in scaling.items()}
        rope = config_of("olmo3", tmp_path / "m.gguf", metadata=keys).rope_parameters
        assert rope["full_attention"]["beta_fast"] == 16.0
        assert rope["full_attention"]["rope_type"] == "yarn"
        assert rope["sliding_attention"]["rope_type"] == "default"


class TestRefusals:
    """Whatever a file says that would be lost is said to be so, with its name."""

    def refused(self, name: str, path: Path, *words: str, **settings: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            convert(save_tiny_gguf(name, path, **{**settings_of(name), **settings}))
        for word in (path.name, *words):
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "key", "value"),
        [
            ("llama", "llama.attention.scale", 0.5),
            ("llama", "llama.logit_scale", 2.0),
            ("qwen3", "qwen3.expert_count", 4),
            ("gemma", "gemma.final_logit_softcapping", 30.0),
            ("smollm3", "smollm3.attention.sliding_window", 8),
            ("qwen3-moe", "qwen3moe.expert_shared_count", 1),
        ],
    )
    def test_settings_of_other_families(self, name: str, key: str, value: Any, tmp_path: Path) -> None:
        self.refused(name, tmp_path / "m.gguf", key, "Use the model as safetensors.", metadata={key: value})

    def test_granite_without_rotary_embeddings(self, tmp_path: Path) -> None:
        keys = {"granite.rope.scaling.finetuned": False}
        self.refused("granite", tmp_path / "m.gguf", "no rotary embeddings", "safetensors", metadata=keys)

    def test_heads_of_a_width_that_the_family_does_not_know(self, tmp_path: Path) -> None:
        keys = {"granite.attention.key_length": 12}
        self.refused("granite", tmp_path / "m.gguf", "heads of 12", "safetensors", metadata=keys)
        keys = {"llama.attention.key_length": 8, "llama.attention.value_length": 4}
        self.refused("llama", tmp_path / "n.gguf", "values of 4", "safetensors", metadata=keys)

    def test_a_family_that_rotates_all_of_a_head(self, tmp_path: Path) -> None:
        keys = {"cohere2.rope.dimension_count": 4}
        self.refused("cohere2", tmp_path / "m.gguf", "rotates 4 of 8", metadata=keys)

    def test_one_set_of_factors_without_the_other(self, tmp_path: Path) -> None:
        extra = {"rope_factors_long.weight": np.ones(4, np.float32)}
        self.refused("phi3", tmp_path / "m.gguf", "rope_factors_short.weight is missing", extra=extra)

    def test_factors_that_the_family_has_no_use_for(self, tmp_path: Path) -> None:
        extra = {"rope_factors_long.weight": np.ones(4, np.float32)}
        self.refused("qwen2", tmp_path / "m.gguf", "rope_factors_long.weight", "safetensors", extra=extra)

    def test_fewer_experts_than_there_are(self, tmp_path: Path) -> None:
        keys = {"llama.expert_count": 3}
        self.refused("mixtral", tmp_path / "m.gguf", "not a usable GGUF file", "shape", metadata=keys)

    def test_more_layers_than_there_are(self, tmp_path: Path) -> None:
        """Before a model of so many is made."""
        keys = {"olmo2.block_count": 2**31}
        self.refused("olmo2", tmp_path / "m.gguf", "2,147,483,648 layers", metadata=keys)

    @pytest.mark.parametrize("pattern", [[True], "alternating", [1, 2]])
    def test_windows_of_some_layers(self, pattern: Any, tmp_path: Path) -> None:
        keys = {"olmo2.attention.sliding_window_pattern": pattern}
        self.refused("olmo3", tmp_path / "m.gguf", "windows", "Download or copy", metadata=keys)

    def test_text_that_is_split_in_an_unknown_way(self, tmp_path: Path) -> None:
        keys = {"tokenizer.ggml.pre": "poro-chat"}
        self.refused("llama", tmp_path / "m.gguf", "poro-chat", "safetensors", metadata=keys)


def test_cohere_splits_digits_and_joins_accents(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.pre": "command-r"}
    path = save_tiny_gguf("cohere", tmp_path / "m.gguf", metadata=keys, **settings_of("cohere"))
    tokenizer = AutoTokenizer.from_pretrained(convert(path))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12")
    assert [piece for piece, _ in pieces] == ["a", "Ġ", "1", "2"]
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids


def test_supported_architectures_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = page.split("## GGUF files")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| `([\w-]+)` \|", rows, re.MULTILINE))
    assert documented == ARCHITECTURES.keys()
