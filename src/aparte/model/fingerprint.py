"""Taking a model's fingerprint.

It covers the parts of the configuration that the middle layers depend on, and a sample of a few
kilobytes of each of their tensors: enough to tell two fine-tunes of one base apart, cheap enough to
take at every start, and readable without holding the weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from aparte.config import Cut
from aparte.fingerprint import Fingerprint
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


def take_fingerprint(blueprint: Blueprint, cut: Cut, name: str) -> Fingerprint:
    """Fingerprint of the middle of ``blueprint`` at ``cut``.

    ``name`` is the MODEL that the user gave. It is shown to the other side, so of a path only the last
    part goes in.
    """
    values = {key: getattr(blueprint.config, key, None) for key in CONFIG_KEYS}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    sample = blueprint.checkpoint.sample(blueprint.middle_names(cut))
    path = Path(name).expanduser()
    return Fingerprint(
        name=path.resolve().name if path.exists() else name,
        cut=str(cut),
        config=digest[:32],
        tensors=sample.hex()[:32] if sample else "",
        revision=_revision(blueprint.checkpoint.folder),
    )


def _revision(folder: Path) -> str:
    """The commit of a model in the hub library's cache, ``.../snapshots/<commit>``; empty elsewhere."""
    return folder.name if folder.parent.name == "snapshots" else ""
