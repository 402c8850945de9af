"""Tiny random models as GGUF files, written the way llama.cpp's converter writes their families.

What that converter does is spelled out here once more, forwards, and independently of the program that
reads such files: names of settings and tensors are those of the ``gguf`` package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch

from tiny import CHAT_TEMPLATE, MERGES, SPECIALS, tiny_model, tiny_tokenizer

#: What GGUF calls the architecture of a family, by ``model_type``; the same where it isn't here.
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "gpt_neox": "gptneox",
    "cohere": "command-r",
}

#: Models in :data:`tiny.VARIANTS` by name, with what GGUF takes for granted of their families.
GGUF_VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mistral-nemo": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"mlp_only_layers": [], "moe_intermediate_size": 32},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"query_pre_attn_scalar": 8},
    "phi3": {},
    "phi3-longrope": {},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "smollm3": {"no_rope_layer_interval": 4, "layers": 5},
    "gpt-neox": {},
    "gpt-neox-serial": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": {},
}


def save_tiny_gguf(
    family: str,
    path: Path,
    *,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, numpy.ndarray[Any, Any]] | None = None,
    **settings: Any,
) -> Path:
    """Write :func:`~tiny.tiny_model` and its tokenizer the way llama.cpp's converter does; return ``path``.

    ``kind`` is the type of the matrices (norms and biases stay float32); ``metadata`` and ``extra``
    add keys and tensors, or replace keys; a key that is ``None`` is left out.
    """
    model = tiny_model(family, **settings)
    arch = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    keys = {**_tokenizer(), **_settings(arch, model.config), **(metadata or {})}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            add[type(value)](key, value)
    for name, weight in _tensors(arch, model):
        data = weight.numpy()
        raw = gguf.GGMLQuantizationType.F32 if data.ndim == 1 else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(data, raw), raw_dtype=raw)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token, _ in vocab],
        "tokenizer.ggml.merges": MERGES.split("|"),
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _settings(arch: str, config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
    }
    if arch != "gptneox":
        keys["attention.head_count_kv"] = config.num_key_value_heads
    for name, key in (
        ("rms_norm_eps", "layer_norm_rms_epsilon"),
        ("layer_norm_eps", "layer_norm_epsilon"),
        ("norm_epsilon", "layer_norm_epsilon"),
    ):
        if hasattr(config, name):
            keys[f"attention.{key}"] = getattr(config, name)
    keys |= _rope(arch, config) | _special(config.model_type, config)
    return {
        "general.name": f"Tiny {config.model_type.title()}",
        **{f"{arch}.{key}": value for key, value in keys.items()},
    }


def _rope(arch: str, config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    by_kind = "full_attention" in rope
    full = rope["full_attention"] if by_kind else rope
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {"rope.freq_base": float(full["rope_theta"])}
    if by_kind and arch == "gemma3":
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if arch in ("gemma", "gemma2", "gptneox"):
        del keys["rope.freq_base"]  # not written for these
    if head_dim != config.hidden_size // config.num_attention_heads or arch.startswith(("gemma", "qwen3")):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch in ("llama", "granite", "smollm3", "phi3", "gptneox", "cohere2"):
        keys["rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 1.0))
    if full["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    if arch in ("command-r", "cohere2"):
        keys["rope.scaling.type"] = "none"
    if arch == "phi3":
        original = config.original_max_position_embeddings
        keys["rope.scaling.original_context_length"] = original
        if full["rope_type"] == "longrope":
            stretch = config.max_position_embeddings / original
            keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
    return keys


def _special(family: str, config: Any) -> dict[str, Any]:
    """Settings of one family alone."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    match family:
        case "mistral" | "starcoder2":
            # Not written by the converter, which loses it; files may say it.
            return {"attention.sliding_window": window} if window else {}
        case "mixtral":
            return {
                "expert_count": config.num_local_experts,
                "expert_used_count": config.num_experts_per_tok,
                "attention.sliding_window": window,
            }
        case "qwen3_moe":
            return {
                "expert_count": config.num_experts,
                "expert_used_count": config.num_experts_per_tok,
                "expert_feed_forward_length": config.moe_intermediate_size,
            }
        case "gemma2":
            return {
                "attn_logit_softcapping": config.attn_logit_softcapping,
                "final_logit_softcapping": config.final_logit_softcapping,
                "attention.sliding_window": window,
            }
        case "gemma3_text":
            period = kinds.index("full_attention") + 1
            return {"attention.sliding_window": window, "attention.sliding_window_pattern": period}
        case "phi3":
            return {"attention.sliding_window": window or 0}
        case "olmo3":
            pattern = [kind == "sliding_attention" for kind in kinds]
            return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}
        case "granite":
            return {
                "attention.scale": config.attention_multiplier,
                "embedding_scale": config.embedding_multiplier,
                "residual_scale": config.residual_multiplier,
                "logit_scale": config.logits_scaling,
            }
        case "gpt_neox":
            return {"use_parallel_residual": config.use_parallel_residual}
        case "cohere":
            return {"logit_scale": config.logit_scale}
        case "cohere2":
            period = kinds.index("full_attention") + 1
            return {
                "logit_scale": config.logit_scale,
                "attention.sliding_window": window,
                "attention.sliding_window_pattern": period,
            }
    return {}


def _tensors(arch: str, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    config = model.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(".experts.gate_up_proj"):  # [E, 2 I, D]
            for kind, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{kind}_exps.weight", half.contiguous()
        elif name.endswith(".experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", weight
        else:
            stem, _, suffix = name.rpartition(".")
            yield f"{names.get_name(stem)}.{suffix}", _as_stored(arch, name, weight, config)
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"])


def _as_stored(arch: str, name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    heads = config.num_attention_heads
    if arch in ("llama", "granite", "smollm3") and (".q_proj." in name or ".k_proj." in name):
        # The order of the rows of q and k in architectures that rotate neighbouring dimensions.
        count = heads if ".q_proj." in name else config.num_key_value_heads
        halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
        return halves.transpose(1, 2).reshape(weight.shape).contiguous()
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    if ".query_key_value." in name:
        by_head = weight.reshape(heads, 3, weight.shape[0] // heads // 3, *weight.shape[1:])
        return torch.cat([by_head[:, part].reshape(-1, *weight.shape[1:]) for part in range(3)])
    return weight
