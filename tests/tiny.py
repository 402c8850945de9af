"""Tiny random models of every supported family, and a tokenizer for them, built in code.

No download, no fixture file: the same seed gives the same model everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

#: The families that most tests run with; :data:`VARIANTS` are all.
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

_ROPE = {"rope_theta": 10000.0}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
#: Kinds of layers that alternate, for up to 12 layers.
_KINDS = [_SLIDING[layer % 3] for layer in range(12)]

#: Model by name: its family and the settings that make it what it is.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-dynamic": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                **_ROPE,
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral-nemo": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mixtral": ("mixtral", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-5}),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "layer_types": _KINDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 8, "layer_types": _KINDS}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "gpt-neox": (
        "gpt_neox",
        {"rope_parameters": {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "gpt-neox-serial": ("gpt_neox", {"use_parallel_residual": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "cohere": ("cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"logit_scale": 0.3, "sliding_window": 8, "layer_types": _KINDS}),
}
#: Families whose heads are as wide as hidden states and heads say, and that take no other width.
_NO_HEAD_DIM = ("qwen2", "gpt_neox", "phi3", "starcoder2", "olmo2", "olmo3", "granite", "smollm3", "cohere")


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

    ``family`` is a name in :data:`VARIANTS`. ``tied`` defaults to what is usual: tied for llama (as in the
    embedded default), gemma and cohere, untied for the others. ``settings`` override fields of the Hugging
    Face configuration.
    """
    name, own = VARIANTS.get(family, (family, {}))
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
        "tie_word_embeddings": name.startswith(("llama", "gemma", "cohere")) if tied is None else tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": "eager",
        **own,
        **settings,
    }
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:layers]
    if name in _NO_HEAD_DIM:
        del values["head_dim"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **values)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
        for label, weight in model.named_parameters():
            # Hugging Face starts norms at one and biases at zero, which would hide a swapped one.
            if label.endswith(".bias"):
                weight.data.normal_(std=0.5)
            elif "norm" in label:
                weight.data.uniform_(0.5, 1.5)
    return model


def save_tiny(family: str, folder: Path, *, max_shard_size: str = "5GB", **settings: Any) -> Path:
    """Write :func:`tiny_model` and its tokenizer as a Hugging Face folder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(family, **settings).save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder
