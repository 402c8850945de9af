"""What each family of models needs: the one place to look when a new one comes along.

Every family goes the same generic path, which needs of a model of ``transformers`` that it consists of an
embedding, a list of decoder layers that are called one after the other, a final norm and an LM head, and
that its layers learn positions from rotary embeddings and the past from a cache of keys and values. What
is where is read off the model itself (:func:`take_apart`). What can't be seen there, because it is written
in the model's program, stands in :data:`FAMILIES`. To add a family: a line there, and one in
``tests/tiny.py``, whose models ``tests/model/test_families.py`` compares with the library's own.

A family that isn't listed has to pass :mod:`aparte.model.selfcheck` first. Families in :data:`REFUSED` never
do: their layers keep a state that cannot be taken back to an earlier token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: What becomes of logits ``[n, V]`` after the LM head.
Finish = Callable[[torch.Tensor], torch.Tensor]


def _unscaled(_config: Any, _dtype: torch.dtype) -> float:
    return 1.0


def _root_of_width(config: Any, dtype: torch.dtype) -> float:
    """Gemma's factor, rounded to the number format that it is multiplied in."""
    return float(torch.tensor(config.hidden_size**0.5).to(dtype))


def _as_they_are(_config: Any) -> Finish | None:
    return None


def _capped(config: Any) -> Finish | None:
    cap = config.final_logit_softcapping
    return None if cap is None else lambda logits: torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class Family:
    """What a family's model does besides running its layers.

    ``embedding_scale`` is multiplied onto embeddings, ``finish`` is applied to logits. ``stored_as`` are
    parts of tensors' names, in the model and in its checkpoints; ``experts`` what checkpoints call the three
    matrices of one expert (gate, up, down), which the model keeps in two tensors for all. ``plain`` layers
    are those of :mod:`aparte.model.layer`. ``known`` families are tested, others checked when loaded.
    Families that ``restart`` compute a whole text anew when rotary embeddings of the kind *longrope* become
    others for it; of those that don't, what ``generate`` writes depends on how the text was passed to it.
    """

    embedding_scale: Callable[[Any, torch.dtype], float] = _unscaled
    finish: Callable[[Any], Finish | None] = _as_they_are
    stored_as: tuple[tuple[str, str], ...] = ()
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    plain: bool = False
    known: bool = True
    restart: bool = False


#: By ``model_type`` in ``config.json``.
FAMILIES: dict[str, Family] = {
    "llama": Family(plain=True),
    "mistral": Family(plain=True),
    "mixtral": Family(stored_as=((".mlp.", ".block_sparse_moe."),), experts=("w1", "w3", "w2")),
    "qwen2": Family(plain=True),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "gemma": Family(embedding_scale=_root_of_width),
    "gemma2": Family(embedding_scale=_root_of_width, finish=_capped),
    "gemma3_text": Family(embedding_scale=_root_of_width, finish=_capped),
    "phi3": Family(restart=True),
    "olmo2": Family(),
    "olmo3": Family(),
    "granite": Family(
        embedding_scale=lambda config, _dtype: float(config.embedding_multiplier),
        finish=lambda config: lambda logits: logits / config.logits_scaling,
    ),
    "smollm3": Family(),
    "gpt_neox": Family(stored_as=(("lm_head.", "embed_out."),)),
    "starcoder2": Family(),
    "cohere": Family(finish=lambda config: lambda logits: logits * config.logit_scale),
    "cohere2": Family(finish=lambda config: lambda logits: logits * config.logit_scale),
}

#: Any other.
UNLISTED = Family(known=False)

_RECURRENT = (
    "its layers keep a running state instead of keys and values, which cannot be taken back when drafted "
    "tokens are rejected, nor differ between the branches of a token tree"
)
_HYBRID = f"some of {_RECURRENT}"
_IMAGES = (
    "it is a model for images or sound as well as text, and aparte handles text only; a checkpoint of its "
    "text model alone may do"
)

#: Why models of these families cannot be run.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        (
            "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
            "lfm2_moe", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
            "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
        ),
        _HYBRID,
    ),
}  # fmt: skip

#: What ``layer_types`` of a configuration may name.
KINDS = ("full_attention", "sliding_attention")


def reason_to_refuse(config: Any) -> str | None:
    """Why this configuration cannot be run, as far as one can tell without its layers; None if it may be."""
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        return f"its weights are quantised ({method or 'somehow'}); use its 16-bit version, or a GGUF file"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder beside its decoder"
    if hasattr(config, "text_config"):
        return _IMAGES
    if getattr(config, "use_bidirectional_attention", False):
        return "its tokens look at later ones, so it does not write from left to right"
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - set(KINDS)):
        return f"a cache of keys and values cannot serve its layers of the kind {unknown[0]!r}"
    return None


def windows_of(config: Any) -> list[int | None]:
    """Sliding window of each layer of the model, None for full attention."""
    sliding = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [sliding if kind == "sliding_attention" else None for kind in kinds]


def uniform_context(config: Any) -> int:
    """Most positions of a sequence for which the rotary embeddings are the same as for all shorter ones.

    Those of the kind *longrope* are others for all tokens of a longer one: its keys have to be computed anew,
    because what a text's beginning means depends on how long it becomes. Those of the kind *dynamic* would be
    others as well, but only beyond ``max_position_embeddings``, where the context ends.
    """
    limits = [int(config.max_position_embeddings)]
    settings = getattr(config, "rope_parameters", None) or {}
    for each in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        if each.get("rope_type") == "longrope" and each.get("original_max_position_embeddings"):
            limits.append(int(each["original_max_position_embeddings"]))
    return min(limits)


def rotary_switch(config: Any) -> int | None:
    """The length beyond which a text is computed anew with other rotary embeddings, if there is one."""
    uniform = uniform_context(config)
    restarts = FAMILIES.get(config.model_type, UNLISTED).restart
    return uniform if restarts and uniform < config.max_position_embeddings else None


def longest_context(config: Any) -> int:
    """Most positions a sequence may have."""
    uniform = uniform_context(config)
    return uniform if rotary_switch(config) is None else int(config.max_position_embeddings)


@dataclass(frozen=True)
class Anatomy:
    """Where a model keeps its parts: names of modules, and how its layers want to be called.

    ``norm`` and ``rotary`` are children of the ``decoder``; ``cache`` is an argument of a layer. With
    ``rotary_by_kind`` positions are embedded differently for every kind of layer.
    """

    decoder: str
    embedding: str
    norm: str
    head: str
    rotary: str
    cache: str
    rotary_by_kind: bool


class UnfitError(Exception):
    """A model that the generic path cannot run; the message completes "... is not supported: "."""


def take_apart(model: Any) -> Anatomy:
    """Find the parts of a causal language model. Raises :class:`UnfitError`."""
    names = {id(module): name for name, module in model.named_modules()}
    try:
        decoder = model.get_decoder()
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        raise UnfitError("it does not say which of its parts are the decoder and its ends") from None
    layers = getattr(decoder, "layers", None)
    count = getattr(model.config, "num_hidden_layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != count:
        raise UnfitError("its decoder layers are not in one list called 'layers'")
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        raise UnfitError("its embedding or its LM head is not a single matrix")
    rest = {name: part for name, part in decoder.named_children() if part not in (embedding, layers)}
    rotary = [name for name in rest if "rotary" in name]
    if len(rotary) != 1:
        raise UnfitError("its positions do not come from one rotary embedding")
    norm = [name for name in rest if "norm" in name]
    others = [
        name for name, part in rest.items() if name not in norm and any(True for _ in part.parameters())
    ]
    if len(norm) != 1 or others:
        raise UnfitError(f"its decoder has parts besides layers and a norm: {', '.join(others) or 'no norm'}")
    arguments = inspect.signature(layers[0].forward).parameters
    cache = [name for name in ("cache", "past_key_values", "layer_past") if name in arguments]
    if not cache or "position_embeddings" not in arguments:
        raise UnfitError("its layers do not take a cache and rotary embeddings as arguments")
    return Anatomy(
        decoder=names[id(decoder)],
        embedding=names[id(embedding)],
        norm=norm[0],
        head=names[id(head)],
        rotary=rotary[0],
        cache=cache[0],
        rotary_by_kind="layer_type" in inspect.signature(rest[rotary[0]].forward).parameters,
    )
