"""What GGUF says, keeps and leaves out otherwise than Hugging Face does, by architecture.

GGUF names architectures itself: one may stand for several families of ``transformers`` (llama: Llama,
Mistral, Mixtral), and what the programs that run such files take for granted is not in them (which layers of
Gemma 2 have a window, for example). :data:`ARCHITECTURES` says both, in one line and one function for each;
the tensors are in :mod:`aparte.model.gguf_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aparte.errors import CheckpointError
from aparte.model import gguf_rope

if TYPE_CHECKING:
    from aparte.model.gguf_file import GgufFile

Values = dict[str, Any]


class Settings:
    """A file's settings without the architecture that they begin with; remembers which were asked for."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file = file
        self.arch = arch
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def need(self, key: str) -> Any:
        """A setting that the file cannot do without."""
        self.read.add(key)
        return self.file.need(f"{self.arch}.{key}")

    def count(self, key: str, value: Any) -> int:
        """``value``, which has to be one positive number."""
        if type(value) is not int or value < 1:
            raise self.file.damaged(f"{key} is {value!r}, not one positive number for all layers")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path} {what}, which is not supported as GGUF. Use the model as safetensors."
        )


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF.

    ``complete`` adds to the values of a configuration and returns its class in ``transformers``, without
    the "Config". With ``pairs`` rotary embeddings turn neighbouring dimensions of a head in these files, and
    those half a head apart in ``transformers``: rows of queries and keys are in another order. With
    ``norms_from_one`` norms are stored as what they multiply by, and in ``transformers`` as what is added
    to one. With ``joined_qkv`` queries, keys and values of all heads follow one another, and in
    ``transformers`` those of each head.
    """

    complete: Callable[[Settings, Values], str]
    pairs: bool = False
    norms_from_one: bool = False
    joined_qkv: bool = False


def _rms(settings: Settings, values: Values) -> None:
    values["rms_norm_eps"] = settings.need("attention.layer_norm_rms_epsilon")


def _head_dim(settings: Settings, values: Values, *, free: bool = True) -> int:
    """How wide heads are. Without ``free`` the family knows no other width than hidden size over heads."""
    usual = values["hidden_size"] // values["num_attention_heads"]
    head_dim = settings.count("attention.key_length", settings.get("attention.key_length", usual))
    if (value := settings.get("attention.value_length", head_dim)) != head_dim:
        raise settings.unsupported(f"has keys of {head_dim} dimensions and values of {value}")
    if free:
        values["head_dim"] = head_dim
    elif head_dim != usual:
        raise settings.unsupported(f"has heads of {head_dim} dimensions, not {usual}")
    return head_dim


def _rotated(settings: Settings, values: Values, *, free: bool = True) -> int:
    head_dim = _head_dim(settings, values, free=free)
    values["rope_parameters"] = gguf_rope.parameters(settings, head_dim)
    return head_dim


def _kinds(settings: Settings, values: Values, usual: int) -> list[str]:
    """Which layers have a sliding window: all but every ``usual``-th, if the file doesn't say."""
    layers = values["num_hidden_layers"]
    pattern = settings.get("attention.sliding_window_pattern", usual)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) < layers:
        raise settings.file.damaged("its sliding windows are not those of all layers")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern[:layers]]


def _llama(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    _rotated(settings, values)
    window = settings.get("attention.sliding_window") or None
    if experts := settings.get("expert_count"):
        values["sliding_window"] = window
        values["num_local_experts"] = settings.count("expert_count", experts)
        values["num_experts_per_tok"] = settings.count(
            "expert_used_count", settings.need("expert_used_count")
        )
        return "Mixtral"
    if window or "mistral" in str(settings.file.metadata.get("general.name")).lower():
        values["sliding_window"] = window
        return "Mistral"
    values["attention_bias"] = settings.has("blk.0.attn_q.bias")
    values["mlp_bias"] = settings.has("blk.0.ffn_up.bias")
    return "Llama"


def _qwen2(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    _rotated(settings, values, free=False)
    return "Qwen2"


def _qwen3(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    _rotated(settings, values)
    values["attention_bias"] = settings.has("blk.0.attn_q.bias")
    return "Qwen3"


def _qwen3moe(settings: Settings, values: Values) -> str:
    _qwen3(settings, values)
    used = settings.count("expert_used_count", settings.need("expert_used_count"))
    width = settings.get("expert_feed_forward_length") or values["intermediate_size"] // used
    values["num_experts"] = settings.count("expert_count", settings.need("expert_count"))
    values["num_experts_per_tok"] = used
    values["moe_intermediate_size"] = settings.count("expert_feed_forward_length", width)
    values["norm_topk_prob"] = settings.get("expert_weights_norm", True)
    return "Qwen3Moe"


def _gemma(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    _rotated(settings, values)
    return "Gemma"


def _gemma_scale(values: Values, largest: int) -> None:
    """Scores are divided by the root of a head's width, but for the largest model, known by its layers."""
    values["query_pre_attn_scalar"] = (
        values["hidden_size"] // values["num_attention_heads"]
        if values["num_hidden_layers"] == largest
        else values["head_dim"]
    )


def _gemma2(settings: Settings, values: Values) -> str:
    _gemma(settings, values)
    _gemma_scale(values, largest=46)
    values["attn_logit_softcapping"] = settings.get("attn_logit_softcapping", 50.0)
    values["final_logit_softcapping"] = settings.get("final_logit_softcapping", 30.0)
    values["sliding_window"] = settings.get("attention.sliding_window", 4096)
    values["layer_types"] = _kinds(settings, values, usual=2)
    return "Gemma2"


def _gemma3(settings: Settings, values: Values) -> str:
    _gemma(settings, values)
    _gemma_scale(values, largest=62)
    values["final_logit_softcapping"] = settings.get("final_logit_softcapping")
    if window := settings.get("attention.sliding_window"):
        values["sliding_window"] = window
        values["layer_types"] = _kinds(settings, values, usual=6)
    else:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    _rope_by_kind(values, local=settings.get("rope.freq_base_swa", 10000.0))
    return "Gemma3Text"


def _rope_by_kind(values: Values, local: float) -> None:
    """Layers with a window turn by plain embeddings of their own; only the others' are stretched."""
    values["rope_parameters"] = {
        "full_attention": values["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _phi3(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    head_dim = _head_dim(settings, values, free=False)
    values["sliding_window"] = settings.get("attention.sliding_window") or None
    original = settings.get("rope.scaling.original_context_length", values["max_position_embeddings"])
    values["original_max_position_embeddings"] = settings.count("original_context_length", original)
    values["rope_parameters"] = gguf_rope.longrope(settings, head_dim, values)
    return "Phi3"


def _olmo2(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    _rotated(settings, values, free=False)
    window = settings.get("attention.sliding_window")
    if not window:
        return "Olmo2"
    values["sliding_window"] = window
    values["layer_types"] = _kinds(settings, values, usual=4)
    full = values["rope_parameters"]["rope_theta"]
    _rope_by_kind(values, local=settings.get("rope.freq_base_swa", full))
    return "Olmo3"


def _granite(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    head_dim = _rotated(settings, values, free=False)
    if settings.get("rope.scaling.finetuned", True) is False:
        raise settings.unsupported("has no rotary embeddings")
    values["attention_multiplier"] = settings.get("attention.scale") or head_dim**-0.5
    values["embedding_multiplier"] = settings.get("embedding_scale") or 1.0
    values["residual_multiplier"] = settings.get("residual_scale") or 1.0
    values["logits_scaling"] = settings.need("logit_scale")
    values["attention_bias"] = settings.has("blk.0.attn_q.bias")
    values["mlp_bias"] = settings.has("blk.0.ffn_up.bias")
    return "Granite"


def _smollm3(settings: Settings, values: Values) -> str:
    _rms(settings, values)
    _rotated(settings, values, free=False)
    values["no_rope_layer_interval"] = 4
    values["attention_bias"] = settings.has("blk.0.attn_q.bias")
    values["mlp_bias"] = settings.has("blk.0.ffn_up.bias")
    return "SmolLM3"


def _gptneox(settings: Settings, values: Values) -> str:
    values["layer_norm_eps"] = settings.need("attention.layer_norm_epsilon")
    head_dim = _head_dim(settings, values, free=False)
    values["rope_parameters"] = gguf_rope.parameters(settings, head_dim, partly=True)
    values["use_parallel_residual"] = settings.need("use_parallel_residual")
    if values.pop("num_key_value_heads") != values["num_attention_heads"]:
        raise settings.unsupported("shares keys and values between heads")
    return "GPTNeoX"


def _starcoder2(settings: Settings, values: Values) -> str:
    values["norm_epsilon"] = settings.need("attention.layer_norm_epsilon")
    _rotated(settings, values, free=False)
    values["sliding_window"] = settings.get("attention.sliding_window") or None
    values["use_bias"] = settings.has("blk.0.attn_q.bias")
    return "Starcoder2"


def _cohere(settings: Settings, values: Values) -> str:
    values["layer_norm_eps"] = settings.need("attention.layer_norm_epsilon")
    _rotated(settings, values, free=False)
    values["logit_scale"] = settings.need("logit_scale")
    values["attention_bias"] = settings.has("blk.0.attn_q.bias")
    values["use_qk_norm"] = settings.has("blk.0.attn_q_norm.weight")
    return "Cohere"


def _cohere2(settings: Settings, values: Values) -> str:
    _cohere(settings, values)
    del values["use_qk_norm"]
    values["sliding_window"] = settings.need("attention.sliding_window")
    values["layer_types"] = _kinds(settings, values, usual=4)
    return "Cohere2"


#: By ``general.architecture``.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, pairs=True),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3moe),
    "gemma": Architecture(_gemma, norms_from_one=True),
    "gemma2": Architecture(_gemma2, norms_from_one=True),
    "gemma3": Architecture(_gemma3, norms_from_one=True),
    "phi3": Architecture(_phi3),
    "olmo2": Architecture(_olmo2),
    "granite": Architecture(_granite, pairs=True),
    "smollm3": Architecture(_smollm3, pairs=True),
    "gptneox": Architecture(_gptneox, joined_qkv=True),
    "starcoder2": Architecture(_starcoder2),
    "command-r": Architecture(_cohere),
    "cohere2": Architecture(_cohere2),
}
