"""Which tensor of a GGUF file each tensor of a checkpoint comes from, and what has to be undone with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aparte.errors import CheckpointError
from aparte.model.gguf_architectures import ARCHITECTURES
from aparte.model.gguf_rope import factor_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from aparte.model.gguf_file import GgufFile, GgufTensor

Undo = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Source:
    """Where a tensor of the checkpoint comes from."""

    tensor: GgufTensor
    undo: Undo | None

    @property
    def nbytes(self) -> int:
        """Size of what :meth:`load` gives."""
        return math.prod(self.tensor.shape) * (2 if self.tensor.kind.name in ("F16", "BF16") else 4)

    def load(self) -> torch.Tensor:
        """The tensor as ``transformers`` has it. ``NotImplementedError`` for unknown number formats."""
        weight = self.tensor.load()
        return weight if self.undo is None else self.undo(weight)


def sources(file: GgufFile, config: PretrainedConfig) -> dict[str, Source]:
    """Checkpoint tensor name to its source, after checking that names and shapes all match.

    Experts, which GGUF keeps in one tensor per matrix of a layer, become tensors of their own, as in the
    families' checkpoints: no more than one has to be held at a time.
    """
    arch = file.need("general.architecture")
    found: dict[str, Source] = {}
    used = set(factor_tensors(arch))
    for name, gguf_name, expert, shape in _wanted(arch, config):
        if expert is not None and gguf_name not in file.tensors:  # from before experts were stacked
            gguf_name, expert, shape = gguf_name.replace("_exps.", f".{expert}."), None, shape[1:]
        tensor = file.tensors.get(gguf_name)
        if tensor is None:
            raise file.damaged(f"tensor {gguf_name} is missing")
        if tensor.shape != shape:
            raise file.damaged(f"tensor {gguf_name} is of shape {tensor.shape}, not {shape}")
        used.add(gguf_name)
        found[name] = Source(tensor if expert is None else tensor.part(expert), _undo(arch, name, config))
    if extra := sorted(set(file.tensors) - used):
        raise CheckpointError(
            f"{file.path} has a tensor {extra[0]} that {config.model_type} models have no use for, so it "
            "would not run as it was meant to. Use the model as safetensors."
        )
    return found


def _wanted(arch: str, config: PretrainedConfig) -> Iterator[tuple[str, str, int | None, tuple[int, ...]]]:
    """Of all tensors the name in the checkpoint, that in GGUF, which part of it, and its shape there."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    from aparte.model.families import FAMILIES

    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config, trust_remote_code=False).state_dict()
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    family = FAMILIES[config.model_type]
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    table = get_tensor_name_map(number, config.num_hidden_layers)
    for name, weight in expected.items():
        stored = name
        for ours, theirs in family.stored_as:
            stored = stored.replace(ours, theirs)
        shape = tuple(weight.shape)
        stem, experts, matrix = stored.partition(".experts.")
        if not experts:
            stem, _, suffix = stored.rpartition(".")
            yield stored, f"{table.get_name(stem)}.{suffix}", None, shape
            continue
        layer = re.search(r"\.layers\.(\d+)\.", name)
        assert layer is not None
        gate, up, down = family.experts
        if matrix == "gate_up_proj":
            parts, shape = ((gate, "gate"), (up, "up")), (shape[0], shape[1] // 2, shape[2])
        else:
            parts = ((down, "down"),)  # type: ignore[assignment]
        for expert in range(shape[0]):
            for part, kind in parts:
                yield (
                    f"{stem}.experts.{expert}.{part}.weight",
                    f"blk.{layer[1]}.ffn_{kind}_exps.weight",
                    expert,
                    shape,
                )


def _undo(arch: str, name: str, config: PretrainedConfig) -> Undo | None:
    """What llama.cpp's conversion did to a tensor of this name, backwards."""
    kept = ARCHITECTURES[arch]
    if kept.pairs and (found := re.search(r"\.([qk])_proj\.", name)):
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        return lambda weight: _halves_from_pairs(weight, heads)
    if kept.norms_from_one and name.endswith("norm.weight"):
        return lambda weight: weight.float() - 1
    if kept.joined_qkv and ".query_key_value." in name:
        return lambda weight: _by_head(weight, config.num_attention_heads)
    return None


def _halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions, Hugging Face those half a head apart."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _by_head(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of all queries, all keys, all values to those of the first head, of the second, ..."""
    joined = weight.reshape(3, heads, weight.shape[0] // heads // 3, *weight.shape[1:])
    return joined.transpose(0, 1).reshape(weight.shape).contiguous()
