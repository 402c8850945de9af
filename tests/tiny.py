"""Tiny random models of every supported family, and a tokenizer for them, built in code.

No download, no fixture file: the same seed gives the same model everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Merges of a byte-level BPE, in order; "Ġ" is the space. Enough that text has tokens of several lengths.
MERGES = (
    "Ġ t|h e|i n|r e|o n|a t|e r|Ġ a|Ġt he|o r|e n|i s|Ġ s|n d|o u|e s|Ġ w|in g|Ġ o|i t|"
    "a n|Ġ c|a l|a r|Ġ f|Ġ p|Ġ b|Ġ m|Ġ d|Ġa nd|Ġo f|Ġ in|e d|Ġt o|l l|Ġ h|s t|o m|i c|Ġ (|Ġ ="
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CLASSES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"rms_norm_eps": 1e-5}),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens: every text encodes, and ``<|im_end|>`` ends an answer."""
    merges = [tuple(pair.split(" ")) for pair in MERGES.split("|")]
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    family: str, *, layers: int = 6, tied: bool | None = None, seed: int = 0, **settings: Any
) -> PreTrainedModel:
    """A random float32 model: hidden size 32, grouped-query attention, vocabulary of :func:`tiny_tokenizer`.

    ``tied`` defaults to what is usual: tied for llama (as in the embedded default), untied for the
    others. ``settings`` override fields of the Hugging Face configuration.
    """
    config_class, model_class, own = _CLASSES[family]
    tokenizer = tiny_tokenizer()
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "tie_word_embeddings": family == "llama" if tied is None else tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": "eager",
        **own,
        **settings,
    }
    if family == "qwen2":
        del values["head_dim"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config_class(**values)).to(torch.float32).eval()
        for name, weight in model.named_parameters():
            # Hugging Face starts norms at one and biases at zero, which would hide a swapped one.
            if "norm" in name:
                weight.data.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                weight.data.normal_(std=0.5)
    return model


def save_tiny(family: str, folder: Path, *, max_shard_size: str = "5GB", **settings: Any) -> Path:
    """Write :func:`tiny_model` and its tokenizer as a Hugging Face folder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(family, **settings).save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_gguf(
    family: str,
    path: Path,
    *,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, numpy.ndarray[Any, Any]] | None = None,
    **settings: Any,
) -> Path:
    """Write :func:`tiny_model` and its tokenizer the way llama.cpp's converter does; return ``path``.

    ``kind`` is the type of the matrices (norms and biases stay float32); ``metadata`` and ``extra``
    add keys and tensors, or replace keys; a key that is ``None`` is left out.
    """
    model = tiny_model(family, **settings)
    arch = "llama" if family == "mistral" else family
    keys = {**_gguf_metadata(arch, model.config), **(metadata or {})}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            add[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], model.config.num_hidden_layers)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        data = _to_llama_order(arch, name, weight, model.config).numpy()
        raw = gguf.GGMLQuantizationType.F32 if data.ndim == 1 else quantization
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(data, raw), raw_dtype=raw)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_metadata(arch: str, config: Any) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    keys: dict[str, Any] = {
        "general.name": f"Tiny {config.model_type.title()}",
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
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
    if config.model_type == "mistral" and config.sliding_window:
        keys["llama.attention.sliding_window"] = config.sliding_window
    if config.model_type == "qwen3":
        keys["qwen3.attention.key_length"] = config.head_dim
    return keys


def _to_llama_order(arch: str, name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k in models of its ``llama`` architecture."""
    if arch != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return weight
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
