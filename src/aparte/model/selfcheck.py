"""May a family that nobody has tested here be run? Try it, on a small model of the same configuration.

The check needs no weights, so the device, which has the ends of a model only, and the cloud, which has its
middle, come to the same answer, and a model of any size is checked in about a second: its configuration is
kept, kinds of layers and special factors included, but for the sizes (:func:`shrunk`). The small model gets
random weights, is written out and opened again in parts, the way every model is, and has to give the logits
that ``transformers`` gives for the unsplit one: along a sequence, past a sliding window, and in a token tree.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from aparte.config import Compute
from aparte.errors import CheckpointError
from aparte.model.families import UnfitError
from aparte.step import ROOT, Step, chain_parents

#: Sizes of the small model; what a configuration doesn't have stays out.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 256,
    "sliding_window": 8,
    "num_experts": 32,
    "num_local_experts": 32,
    "n_routed_experts": 32,
}
#: Enough for a full period of any pattern of layers in use.
_LAYERS = 12
_TOKENS = 24
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: Largest difference of logits that rounding may make, of their largest.
_TOLERANCE = 2e-3


def check(config: Any) -> None:
    """Raise :class:`UnfitError` unless a small model like ``config`` computes the same in parts."""
    settings = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if cause := _cause_of_failure(config.model_type, settings):
        raise UnfitError(cause)


@functools.lru_cache(maxsize=8)
def _cause_of_failure(family: str, settings: str) -> str | None:
    """The check, once per configuration; None if it was passed."""
    from transformers import CONFIG_MAPPING

    try:
        expected, got = _both(shrunk(CONFIG_MAPPING[family].from_dict(json.loads(settings))))
    except CheckpointError:
        return "its checkpoints name their tensors otherwise than its model in transformers does"
    except Exception as error:  # anything may go wrong in a model that nobody tried
        return f"a small model of its kind could not be run in parts ({type(error).__name__})"
    difference = float((expected - got).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE:  # a NaN fails too
        return "a small model of its kind gave other logits in parts than unsplit"
    return None


def shrunk(config: Any) -> Any:
    """The same configuration with small sizes."""
    small = copy.deepcopy(config)
    shared = getattr(config, "num_key_value_heads", None)
    layers = config.num_hidden_layers
    for name, size in _SIZES.items():
        now = getattr(config, name, None)
        if now and (name != "head_dim" or not hasattr(config, "qk_rope_head_dim")):
            setattr(small, name, min(size, now) if "experts" in name else size)
    if shared:
        groups = config.num_attention_heads // shared
        small.num_key_value_heads = {1: 4, config.num_attention_heads: 1}.get(groups, 2)
    for name in _IDS:
        if getattr(config, name, None) is not None:
            setattr(small, name, 0)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(small, name, value[:_LAYERS])
    small.num_hidden_layers = min(layers, _LAYERS)
    return small


@torch.inference_mode()
def _both(config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the unsplit model and of its parts for the same sequence, each ``[T, V]``."""
    from transformers import AutoModelForCausalLM

    from aparte.model.checkpoint import Checkpoint
    from aparte.model.parts import Blueprint
    from aparte.model.precision import Precision

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False).float().eval()
        for weight in model.parameters():
            # As the library starts them, attention would hardly look at positions, and norms would be alike.
            if weight.ndim > 1:
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.uniform_(0.5, 1.5)
        tokens = torch.randint(1, config.vocab_size, (_TOKENS,))
    expected = model(tokens[None], use_cache=False).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        with _no_bars():
            model.save_pretrained(folder)
        precision = Precision.resolve(Compute("float32", "cpu"))
        blueprint = Blueprint(Checkpoint.open(Path(folder)), precision, checked=True)
        return expected, _in_parts(blueprint, tokens)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Silence the library's own progress bars; the switch is global, so it is set back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _in_parts(blueprint: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[T, V]`` by front, middle and back: a prompt, a tree around the truth, then one by one."""
    embed, head = blueprint.ends()
    cuts = [0, 1, max(1, blueprint.layers - 1), blueprint.layers]
    bounds = sorted(set(cuts))
    stages = [blueprint.stage(range(*pair)) for pair in pairwise(bounds)]
    caches = [stage.new_cache() for stage in stages]

    def logits(step: Step, ids: torch.Tensor) -> torch.Tensor:
        hidden = embed(ids)
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage.forward(cache, step, hidden)
        result: torch.Tensor = head(hidden)
        return result

    prompt, tree = 6, 6
    rows = [logits(Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, prompt)), tokens[:prompt])]
    # Each true node but the first has a wrong twin before it: slots prompt, prompt + 1 (twin), prompt + 2 ...
    true, parents, ids = [prompt], [prompt - 1], [int(tokens[prompt])]
    for place in range(prompt + 1, prompt + tree):
        parents += [true[-1], true[-1]]
        ids += [int(tokens[place - 3]), int(tokens[place])]
        true.append(prompt + len(ids) - 1)
    step = Step(1, 0, prompt - 1, prompt, tuple(parents))
    rows.append(logits(step, torch.tensor(ids))[[slot - prompt for slot in true]])
    tip, slot = true[-1], prompt + len(ids)
    for number, token in enumerate(tokens[prompt + tree :], start=2):
        rows.append(logits(Step(number, 0, tip, slot, (tip,)), token[None]))
        tip, slot = slot, slot + 1
    return torch.cat(rows)
