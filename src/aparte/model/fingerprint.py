"""Taking a model's fingerprint.

It covers the parts of the configuration that the served layers depend on, and a sample of a few
kilobytes of each of their tensors: enough to tell two fine-tunes of one base apart, cheap enough to take
at every start, and readable without holding the weights. In draft mode the whole model is served.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from aparte.config import Cut
from aparte.fingerprint import WHOLE, Fingerprint
from aparte.model.parts import Blueprint

#: Configuration keys that change what a decoder layer computes.
CONFIG_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "layer_types",
)
#: The same where a family has them. They are left out otherwise, so that they change no other fingerprint.
FAMILY_KEYS = (
    "attention_multiplier",
    "residual_multiplier",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "no_rope_layers",
    "num_experts_per_tok",
    "norm_topk_prob",
    "use_parallel_residual",
    "use_qk_norm",
)
#: What counts besides where the ends are served too. Equal vocabularies make ids mean the same.
WHOLE_KEYS = ("vocab_size", "tie_word_embeddings")


def take_fingerprint(blueprint: Blueprint, cut: Cut | None, name: str) -> Fingerprint:
    """Fingerprint of the middle of ``blueprint`` at ``cut``, or of all of it without one.

    ``name`` is the MODEL that the user gave. It is shown to the other side, so of a path only the last
    part goes in.
    """
    keys = CONFIG_KEYS if cut is not None else CONFIG_KEYS + WHOLE_KEYS
    values = {key: getattr(blueprint.config, key, None) for key in keys}
    own = {key: getattr(blueprint.config, key, None) for key in FAMILY_KEYS}
    values |= {key: value for key, value in own.items() if value is not None}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    sample = blueprint.checkpoint.sample(
        blueprint.all_names() if cut is None else blueprint.middle_names(cut)
    )
    path = Path(name).expanduser()
    return Fingerprint(
        name=path.resolve().name if path.exists() else name,
        cut=WHOLE if cut is None else str(cut),
        config=digest[:32],
        tensors=sample.hex()[:32] if sample else "",
        revision=_revision(blueprint.checkpoint.folder),
    )


def _revision(folder: Path) -> str:
    """The commit of a model in the hub library's cache, ``.../snapshots/<commit>``; empty elsewhere."""
    return folder.name if folder.parent.name == "snapshots" else ""
