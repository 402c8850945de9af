"""The Hugging Face configuration that a GGUF file's metadata describes.

A file that says something this version cannot express is refused: a setting that is left out would
give a model that runs and answers wrongly.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from aparte.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from aparte.model.gguf_file import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: Rotary factors of Llama 3.1 and later. Not a weight: they become part of the configuration.
ROPE_FACTORS = "rope_freqs.weight"
#: Token ids that end an answer: of the text, of a turn, of a message.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def model_config(file: GgufFile) -> PretrainedConfig:
    """The Hugging Face configuration that a GGUF file's metadata describes."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    arch = file.need("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds a model of architecture {arch!r}, which is not supported as GGUF. "
            f"Supported: {', '.join(ARCHITECTURES)} (Mistral files count as llama)."
        )
    _refuse_variants(file, arch)
    hidden, heads = file.need(f"{arch}.embedding_length"), file.need(f"{arch}.attention.head_count")
    values: dict[str, Any] = {
        "vocab_size": _embedding_rows(file),
        "hidden_size": hidden,
        "intermediate_size": file.need(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.need(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.metadata.get(f"{arch}.attention.head_count_kv", heads),
        "max_position_embeddings": file.need(f"{arch}.context_length"),
        "rms_norm_eps": file.need(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype_name(file),
        "eos_token_id": _end_tokens(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    for key, value in values.items():
        if key.startswith(("num_", "hidden", "intermediate")) and (type(value) is not int or value < 1):
            raise file.damaged(f"{key} is {value!r}, not one positive number for all layers")
    head_dim = file.metadata.get(f"{arch}.attention.key_length", hidden // heads)
    values["rope_parameters"] = _rope_parameters(file, arch, head_dim)
    if arch == "qwen2":
        return _checked(file, Qwen2Config, values)
    values["head_dim"] = head_dim
    window = file.metadata.get(f"{arch}.attention.sliding_window")
    if arch == "llama" and (window or "mistral" in str(file.metadata.get("general.name")).lower()):
        return _checked(file, MistralConfig, {**values, "sliding_window": window or None})
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch == "qwen3":
        return _checked(file, Qwen3Config, values)
    return _checked(file, LlamaConfig, {**values, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors})


def _checked(file: GgufFile, kind: type[Any], values: dict[str, Any]) -> PretrainedConfig:
    """The configuration with transformers' own checks of types and divisibility as our error."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return kind(**values, architectures=[kind.__name__.replace("Config", "ForCausalLM")])
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
    ) as error:
        raise file.damaged(" ".join(str(error).split()).rstrip(".")) from error


def _refuse_variants(file: GgufFile, arch: str) -> None:
    if file.metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{file.path} is one of {file.metadata['split.count']} parts. Join them first, with "
            "`llama-gguf-split --merge`, and give the result."
        )
    if file.metadata.get(f"{arch}.expert_count", 0):
        raise CheckpointError(
            f"{file.path} is a mixture of experts, which is not supported as GGUF. Use a dense model."
        )


def _embedding_rows(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise file.damaged("tensor token_embd.weight is missing")
    return table.shape[0]


def _dtype_name(file: GgufFile) -> str:
    """The type most of the converted weights have."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        name = {"F16": "float16", "BF16": "bfloat16"}.get(tensor.kind.name, "float32")
        sizes[name] += tensor.raw.nbytes
    return sizes.most_common(1)[0][0]


def _end_tokens(file: GgufFile) -> int | list[int] | None:
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    ends = list(dict.fromkeys(token for token in found if token is not None))
    return ends if len(ends) > 1 else ends[0] if ends else None


def _rope_parameters(file: GgufFile, arch: str, head_dim: int) -> dict[str, Any]:
    def setting(name: str) -> Any:
        return file.metadata.get(f"{arch}.rope.{name}")

    theta = setting("freq_base") or 10000.0
    if (rotated := setting("dimension_count") or head_dim) != head_dim:
        raise CheckpointError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions per head, which is not supported. "
            "Use the model as safetensors."
        )
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    kind, factor = setting("scaling.type") or "none", setting("scaling.factor")
    if kind == "none" or factor in (None, 0, 1):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    original = setting("scaling.original_context_length")
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise CheckpointError(
        f"{file.path} stretches its context in a way that is not supported ({kind}). "
        "Use the model as safetensors."
    )


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's stretched rotary embedding, of which GGUF keeps only the resulting factors.

    The settings are recovered from the largest factor and the constants that all these models share,
    and accepted if they reproduce the file's factors.
    """
    import torch

    stored = file.tensors[ROPE_FACTORS].load().double()
    low, high, original, factor = 1.0, 4.0, 8192, float(stored.max())
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-3):
        raise CheckpointError(
            f"{file.path} has rotary factors that are not Llama 3's, which is not supported. "
            "Use the model as safetensors."
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
