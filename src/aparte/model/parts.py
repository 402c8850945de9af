"""Build front, middle and back from a checkpoint, reading only the tensors each of them needs.

The skeleton of the model comes from Hugging Face ``transformers`` on the meta device, which costs no
memory; then the layers of one part are filled in one by one, so that loading peaks at about one layer
above the part's own size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aparte.config import Compute, Cut
from aparte.errors import CheckpointError, UserError
from aparte.model.checkpoint import Checkpoint
from aparte.model.fuse import fast_norm, fuse
from aparte.model.linear import PackedLinear, pack_linears, packed_available
from aparte.model.stage import Stage

#: Families whose layers are known to follow the plain interface: hidden states in and out, one cache,
#: one mask, rotary embeddings from positions.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Precision:
    """What numbers a part computes with: ``dtype`` of activations, and whether linears are packed."""

    dtype: torch.dtype
    packed: bool
    device: torch.device

    @property
    def name(self) -> str:
        """The setting's name, as in ``--dtype``."""
        return "packed16" if self.packed else str(self.dtype).removeprefix("torch.")

    @property
    def default_wire(self) -> str:
        """The 16-bit number format to send this precision's activations in."""
        return "bfloat16" if self.dtype == torch.bfloat16 else "float16"

    @classmethod
    def resolve(cls, compute: Compute) -> Precision:
        """Turn the user's settings into what this machine can do. Raises :class:`UserError`."""
        device = torch.device(_pick_device() if compute.device == "auto" else compute.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "There is no CUDA device here. Use --device cpu, or install a CUDA build of torch."
            )
        name: str = compute.dtype
        if name == "auto":
            name = {"cuda": "bfloat16", "mps": "float16"}.get(device.type, "packed16")
            if name == "packed16" and not packed_available():
                name = "float32"
        if name == "packed16":
            if device.type != "cpu" or not packed_available():
                raise UserError("dtype packed16 needs an x86 CPU with AVX2. Use --dtype float32.")
            return cls(torch.float32, True, device)
        return cls(getattr(torch, name), False, device)


class Blueprint:
    """A model's configuration and skeleton; gives out its parts."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision, *, fused: bool = True) -> None:
        """Without ``fused`` the layers stay as ``transformers`` wrote them, for comparison."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self.checkpoint = checkpoint
        self.precision = precision
        self.fused = fused and precision.device.type == "cpu"
        family = checkpoint.config_dict.get("model_type")
        if family not in FAMILIES:
            raise CheckpointError(
                f"Model family {family!r} in {checkpoint.folder} is not supported. "
                f"Supported: {', '.join(FAMILIES)}."
            )
        try:
            config = AutoConfig.from_pretrained(
                checkpoint.folder, local_files_only=True, trust_remote_code=False
            )
            config._attn_implementation = "sdpa"
            with torch.device("meta"):
                self._skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:  # the library has many ways to say that a config is wrong
            raise CheckpointError(
                f"{checkpoint.folder / 'config.json'} does not describe a model that can be built "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}). "
                "Download the model again, or correct the file."
            ) from error
        self.config: Any = config
        self._decoder: Any = self._skeleton.get_decoder()
        self._decoder_name = next(
            name for name, module in self._skeleton.named_modules() if module is self._decoder
        )
        self._state_names = tuple(self._skeleton.state_dict())

    @classmethod
    def open(cls, folder: Path, compute: Compute, *, fused: bool = True) -> Blueprint:
        """The model in ``folder``; nothing is read yet but its headers."""
        return cls(Checkpoint.open(folder), Precision.resolve(compute), fused=fused)

    @property
    def layers(self) -> int:
        """Number of decoder layers of the whole model."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_context(self) -> int:
        """Most positions a sequence may have."""
        return int(self.config.max_position_embeddings)

    def windows(self, layers: Iterable[int]) -> tuple[int | None, ...]:
        """Sliding window of each layer, None for full attention."""
        sliding = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            return tuple(sliding for _ in layers)
        known = {"full_attention": None, "sliding_attention": sliding}
        if unknown := set(kinds) - set(known):
            raise CheckpointError(f"Layers of kind {sorted(unknown)} are not supported yet.")
        return tuple(known[kinds[layer]] for layer in layers)

    def names(self, layers: Iterable[int]) -> tuple[str, ...]:
        """Checkpoint names of the tensors of these decoder layers."""
        prefixes = tuple(f"{self._decoder_name}.layers.{layer}." for layer in layers)
        return tuple(name for name in self._state_names if name.startswith(prefixes))

    def middle_names(self, cut: Cut) -> tuple[str, ...]:
        """Tensors that only the cloud holds."""
        return self.names(cut.middle(self.layers))

    def stage(self, layers: range, progress: Progress | None = None, label: str = "layers") -> Stage:
        """Load decoder layers as a stage."""
        modules = []
        for done, index in enumerate(layers):
            if progress:
                progress(label, done, len(layers))
            layer = self.empty_layer(index)
            self._fill(layer, f"{self._decoder_name}.layers.{index}.")
            modules.append(layer)
        if progress:
            progress(label, len(layers), len(layers))
        return self.wrap(modules, layers.start)

    def empty_layer(self, index: int) -> nn.Module:
        """A decoder layer without weights, built as the model's number ``index``: a copy."""
        layer: nn.Module = copy.deepcopy(self._decoder.layers[index])
        return layer

    def wrap(self, modules: list[nn.Module], first_layer: int) -> Stage:
        """A stage of decoder layers that are loaded; they were built as those from ``first_layer`` on."""
        rotary = type(self._decoder.rotary_emb)(config=self.config).to(self.precision.device)
        return Stage(
            nn.ModuleList(modules).eval(),
            rotary,
            first_layer=first_layer,
            windows=self.windows(range(first_layer, first_layer + len(modules))),
            max_context=self.max_context,
            dtype=self.precision.dtype,
            device=self.precision.device,
        )

    def ends(self) -> tuple[Embedding, Head]:
        """Load the embedding, and the final norm with the LM head. Tied weights are read once."""
        embed_name, head_name = self._end_names()
        weight = self.checkpoint.read([embed_name])[embed_name]
        head_weight = weight if head_name == embed_name else self.checkpoint.read([head_name])[head_name]
        return Embedding(weight, self.precision), Head(self._norm(), head_weight, self.precision)

    def draft_head(self, tokens: torch.Tensor) -> Head:
        """The final norm with the rows of the LM head that belong to ``tokens`` ``[V']``."""
        _, name = self._end_names()
        return Head(self._norm(), self.checkpoint.read([name])[name][tokens], self.precision)

    def _end_names(self) -> tuple[str, str]:
        """Checkpoint names of embedding and LM head; the same one if they are tied."""
        embed = f"{self._decoder_name}.embed_tokens.weight"
        tied = self.config.tie_word_embeddings or "lm_head.weight" not in self.checkpoint.names()
        return embed, embed if tied else "lm_head.weight"

    def _norm(self) -> nn.Module:
        norm: nn.Module = copy.deepcopy(self._decoder.norm)
        self._fill(norm, f"{self._decoder_name}.norm.")
        return (fast_norm(norm) if self.fused else norm).eval()

    def _fill(self, module: nn.Module, prefix: str) -> None:
        names = [name for name in self._state_names if name.startswith(prefix)]
        tensors = self.checkpoint.read(names)
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        try:
            module.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"The tensors under {prefix!r} in {self.checkpoint.folder} do not fit config.json: "
                f"{str(error).splitlines()[-1].strip()} Download the model again."
            ) from error
        module.requires_grad_(False)
        convert(module, self.precision, fused=self.fused)


def convert(module: nn.Module, precision: Precision, *, fused: bool = False) -> None:
    """Bring a module to the precision it computes in, in place; ``fused`` joins operations too."""
    module.to(precision.device, precision.dtype)
    if fused:
        fuse(module, packed=precision.packed)
    if precision.packed:
        pack_linears(module)


class Embedding:
    """Token ids to hidden states. The table stays in 16 bits where the linears do."""

    def __init__(self, weight: torch.Tensor, precision: Precision) -> None:
        stored = torch.float16 if precision.packed else precision.dtype
        self._weight = weight.to(precision.device, stored)
        self._dtype = precision.dtype

    @property
    def nbytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[n]`` of int64 ``-> [n, D]``."""
        return nn.functional.embedding(tokens.to(self._weight.device), self._weight).to(self._dtype)


class Head:
    """Final norm and LM head: hidden states to logits."""

    def __init__(self, norm: nn.Module, weight: torch.Tensor, precision: Precision) -> None:
        self._norm = norm
        self._linear: nn.Module
        if precision.packed:
            self._linear = PackedLinear(weight, None)
        else:
            self._linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            self._linear.weight = nn.Parameter(
                weight.to(precision.device, precision.dtype), requires_grad=False
            )

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, D] -> [n, V]`` in float32."""
        logits: torch.Tensor = self._linear(self._norm(hidden))
        return logits.float()


def _pick_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
