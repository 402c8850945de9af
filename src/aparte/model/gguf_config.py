"""The Hugging Face configuration that a GGUF file's metadata describes.

A file that says something this version cannot express is refused: a setting that is left out would
give a model that runs and answers wrongly.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from aparte.errors import CheckpointError
from aparte.model.gguf_architectures import ARCHITECTURES, Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from aparte.model.gguf_file import GgufFile

#: Token ids that end an answer: of the text, of a turn, of a message.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Settings that change what a model computes, so that one that nobody asked for must not be passed over.
_MATTERS = frozenset(
    {
        "attention.clamp_kqv", "attention.max_alibi_bias", "attention.output_scale", "attention.scale",
        "attention.shared_kv_layers", "attention.sliding_window", "attention.temperature_length",
        "attention.temperature_scale", "attn_logit_softcapping", "embedding_scale", "expert_count",
        "expert_gating_func", "expert_group_count", "expert_shared_count", "expert_weights_scale",
        "final_logit_softcapping", "leading_dense_block_count", "logit_scale", "nextn_predict_layers",
        "num_adapters", "residual_scale", "rope.dimension_sections", "rope.scaling.attn_factor",
        "rope.scaling.yarn_log_multiplier", "router_logit_softcapping", "swin_norm",
    }
)  # fmt: skip


def model_config(file: GgufFile) -> PretrainedConfig:
    """The Hugging Face configuration that a GGUF file's metadata describes."""
    arch = file.need("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds a model of architecture {arch!r}, which is not supported as GGUF. "
            f"Supported: {', '.join(ARCHITECTURES)} (Mistral and Mixtral files count as llama). "
            "Use the model as safetensors, or another model."
        )
    if file.metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{file.path} is one of {file.metadata['split.count']} parts. Join them first, with "
            "`llama-gguf-split --merge`, and give the result."
        )
    settings = Settings(file, arch)
    values = _common(settings)
    name = ARCHITECTURES[arch].complete(settings, values)
    if unread := sorted(key for key in _MATTERS - settings.read if settings.get(key)):
        raise CheckpointError(
            f"{file.path} says {arch}.{unread[0]}, which {name} models have no "
            "use for, so it would not run as it was meant to. Use the model as safetensors."
        )
    return _checked(file, name, values)


def _common(settings: Settings) -> dict[str, Any]:
    """What all architectures say the same way."""
    file = settings.file
    heads, width = settings.need("attention.head_count"), settings.need("embedding_length")
    values: dict[str, Any] = {
        "vocab_size": _embedding_rows(file, width),
        "hidden_size": width,
        "intermediate_size": settings.need("feed_forward_length"),
        "num_hidden_layers": settings.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("attention.head_count_kv", heads),
        "max_position_embeddings": settings.need("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype_name(file),
        "eos_token_id": _end_tokens(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    for key, value in values.items():
        if key.startswith(("num_", "hidden", "intermediate")):
            settings.count(key, value)
    if values["num_hidden_layers"] > len(file.tensors):
        raise file.damaged(f"it has {len(file.tensors)} tensors for {values['num_hidden_layers']:,} layers")
    return values


def _checked(file: GgufFile, name: str, values: dict[str, Any]) -> PretrainedConfig:
    """The configuration with transformers' own checks of types and divisibility as our error."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        config: PretrainedConfig = getattr(transformers, f"{name}Config")(
            **values, architectures=[f"{name.removesuffix('Text')}ForCausalLM"]
        )
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
    ) as error:
        raise file.damaged(" ".join(str(error).split()).rstrip(".")) from error
    return config


def _embedding_rows(file: GgufFile, width: int) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise file.damaged("tensor token_embd.weight is missing")
    if len(table.shape) != 2 or table.shape[1] != width:
        raise file.damaged(f"tensor token_embd.weight is of shape {table.shape}, not {width} wide")
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
