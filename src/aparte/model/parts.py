"""Build front, middle and back from a checkpoint, reading only the tensors each of them needs.

The skeleton of the model comes from Hugging Face ``transformers`` on the meta device, which costs no
memory; then the layers of one part are filled in one by one, so that loading peaks at about one layer
above the part's own size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aparte.config import Compute, Cut
from aparte.errors import CheckpointError, UserError
from aparte.model import attention, compiled
from aparte.model.checkpoint import Checkpoint
from aparte.model.ends import Embedding as Embedding
from aparte.model.ends import Head as Head
from aparte.model.families import (
    FAMILIES,
    REFUSED,
    UNLISTED,
    UnfitError,
    longest_context,
    reason_to_refuse,
    rotary_switch,
    take_apart,
    uniform_context,
    windows_of,
)
from aparte.model.fuse import fast_norm
from aparte.model.heap import trim
from aparte.model.layer import fast_layer
from aparte.model.naming import Naming
from aparte.model.precision import Precision as Precision
from aparte.model.precision import convert as convert
from aparte.model.stage import Stage
from aparte.model.tensor_parallel import Split
from aparte.model.windows import Windows

Progress = Callable[[str, int, int], None]


class Blueprint:
    """A model's configuration and skeleton; gives out its parts."""

    def __init__(
        self, checkpoint: Checkpoint, precision: Precision, *, fused: bool = True, checked: bool = False
    ) -> None:
        """Without ``fused`` the layers stay as ``transformers`` wrote them, for comparison.

        A family that isn't listed has to pass a check here, unless the caller says it is ``checked``.
        """
        self.checkpoint = checkpoint
        self.precision = precision
        #: Which share of every layer this process has; all of it without one.
        self.split: Split | None = None
        self.family = FAMILIES.get(checkpoint.config_dict["model_type"], UNLISTED)
        self.fused = fused and precision.device.type == "cpu" and self.family.known
        if reason := REFUSED.get(checkpoint.config_dict["model_type"]):
            raise _unsupported(checkpoint, reason)
        self.config: Any = _config_of(checkpoint)
        if reason := reason_to_refuse(self.config):
            raise _unsupported(checkpoint, reason)
        skeleton = _skeleton(checkpoint, self.config)
        try:
            self._anatomy = take_apart(skeleton)
            if not (self.family.known or checked):
                from aparte.model.selfcheck import check

                check(self.config)
        except UnfitError as error:
            raise _unsupported(checkpoint, str(error)) from error
        self._decoder: Any = skeleton.get_decoder()
        state = skeleton.state_dict()
        self._state_names = tuple(state)
        self._shapes = {name: tuple(value.shape) for name, value in state.items()}
        self._naming = Naming(self.family, {name: value.shape for name, value in state.items()}, checkpoint)
        self._windows = windows_of(self.config)
        #: What the device makes of each tensor of its own layers, by the model's name of it, if anything.
        self.change: Callable[[str, torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def open(
        cls, folder: Path, compute: Compute, *, fused: bool = True, weightless: bool = False
    ) -> Blueprint:
        """The model in ``folder``; nothing is read yet but its headers.

        With ``weightless`` there may be no weights: enough to know the model, not to compute with it.
        """
        checkpoint = Checkpoint.open(folder, weightless=weightless)
        return cls(checkpoint, Precision.resolve(compute), fused=fused)

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
        return longest_context(self.config)

    @property
    def uniform_context(self) -> int:
        """Most positions a sequence may have without being computed anew on the way."""
        return uniform_context(self.config)

    @property
    def rotary_switch(self) -> int | None:
        """The length beyond which a text is computed anew with other rotary embeddings, if there is one."""
        return rotary_switch(self.config)

    def windows(self, layers: Iterable[int]) -> tuple[int | None, ...]:
        """Sliding window of each layer, None for full attention."""
        return tuple(self._windows[layer] for layer in layers)

    def names(self, layers: Iterable[int]) -> tuple[str, ...]:
        """Checkpoint names of the tensors of these decoder layers."""
        prefixes = tuple(f"{self._anatomy.decoder}.layers.{layer}." for layer in layers)
        return self._naming.stored(name for name in self._state_names if name.startswith(prefixes))

    def layer_prefix(self, index: int) -> str:
        """How the model's names of the tensors of a decoder layer begin."""
        return f"{self._anatomy.decoder}.layers.{index}."

    def shapes(self, layers: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of these decoder layers, by the model's names."""
        prefixes = tuple(map(self.layer_prefix, layers))
        return {name: shape for name, shape in self._shapes.items() if name.startswith(prefixes)}

    def middle_names(self, cut: Cut) -> tuple[str, ...]:
        """Tensors that only the cloud holds."""
        return self.names(cut.middle(self.layers))

    def all_names(self) -> tuple[str, ...]:
        """Tensors of the whole model; tied weights are one."""
        embed, head = self.end_names()
        rest = (name for name in self._state_names if name != f"{self._anatomy.head}.weight")
        names = self._naming.stored(rest)
        return (*names, head) if head != embed else names

    def stage(self, layers: range, progress: Progress | None = None, label: str = "layers") -> Stage:
        """Load decoder layers as a stage."""
        modules = []
        for done, index in enumerate(layers):
            if progress:
                progress(label, done, len(layers))
            layer = self.empty_layer(index)
            self._fill(layer, f"{self._anatomy.decoder}.layers.{index}.", self.split)
            if not self.fused and self.family.known:
                # The same one, for several sessions too; or the one that can go node by node.
                attention.install(layer, attention.NAME if self.precision.invariant else attention.STOCK)
            modules.append(layer)
        if progress:
            progress(label, len(layers), len(layers))
        # Some seconds, where nothing was compiled before.
        compiling = progress if self._may_compile and compiled.pending() else None
        if compiling:
            compiling("kernels", 0, 1)
        stage = self.wrap(modules, layers.start)
        if compiling:
            compiling("kernels", 1, 1)
        return self.split.lead(stage) if self.split else stage

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled between their linears where they can be; Numba does it."""
        return self._may_compile and compiled.available()

    @property
    def _may_compile(self) -> bool:
        return self.fused and self.family.plain and self.precision.linears in ("packed16", "int8")

    def empty_layer(self, index: int) -> nn.Module:
        """A decoder layer without weights, built as the model's number ``index``: a copy."""
        layer: nn.Module = copy.deepcopy(self._decoder.layers[index])
        return layer

    def wrap(self, modules: list[nn.Module], first_layer: int) -> Stage:
        """A stage of decoder layers that are loaded; they were built as those from ``first_layer`` on."""
        rotary = type(getattr(self._decoder, self._anatomy.rotary))(config=self.config)
        rotary = rotary.to(self.precision.device)
        if self.fused and self.family.plain:
            modules = [fast_layer(module, rotary) for module in modules]
        if self.compiles:
            modules = compiled.compiled_layers(modules, rotary)
        if self.precision.invariant and not all(attention.goes_by_node(module) for module in modules):
            raise UserError(
                f"--batch-invariant does not work with model family {self.config.model_type!r}: the library "
                "computes its attention for all nodes at once. Leave the option out."
            )
        numbers = range(first_layer, first_layer + len(modules))
        kinds = getattr(self.config, "layer_types", None) if self._anatomy.rotary_by_kind else None
        return Stage(
            nn.ModuleList(modules).eval(),
            rotary,
            first_layer=first_layer,
            windows=self.windows(numbers),
            rotary_kinds=None if kinds is None else tuple(kinds[layer] for layer in numbers),
            rotary_switch=self.rotary_switch,
            cache_name=self._anatomy.cache,
            max_context=self.max_context,
            dtype=self.precision.dtype,
            device=self.precision.device,
            kv=self.precision.kv,
            invariant=self.precision.invariant,
            recordings=Windows() if self.precision.graphs else None,
        )

    def ends(self) -> tuple[Embedding, Head]:
        """Load the embedding, and the final norm with the LM head. Tied weights are read once."""
        embed_name, head_name = self.end_names()
        weight = self.checkpoint.read([embed_name])[embed_name]
        head_weight = weight if head_name == embed_name else self.checkpoint.read([head_name])[head_name]
        ends = self._embedding(weight), self._head(head_weight, self._head_bias())
        del weight, head_weight
        trim()
        return ends

    def embedding(self) -> Embedding:
        """Load the embedding alone."""
        name, _ = self.end_names()
        return self._embedding(self.checkpoint.read([name])[name])

    def draft_head(self, tokens: torch.Tensor) -> Head:
        """The final norm with the rows of the LM head that belong to ``tokens`` ``[V']``."""
        _, name = self.end_names()
        bias = self._head_bias()
        rows = self.checkpoint.read([name])[name][tokens]
        return self._head(rows, None if bias is None else bias[tokens])

    def _embedding(self, weight: torch.Tensor) -> Embedding:
        scale = self.family.embedding_scale(self.config, self.precision.dtype)
        return Embedding(weight, self.precision, scale)

    def _head(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
        finish = self.family.finish(self.config)
        return Head(self._norm(), weight, self.precision, bias=bias, finish=finish)

    def _head_bias(self) -> torch.Tensor | None:
        name = f"{self._anatomy.head}.bias"
        return self._naming.read([name])[name] if name in self._state_names else None

    def end_names(self) -> tuple[str, str]:
        """Checkpoint names of embedding and LM head; the same one if they are tied."""
        embed, head = self._naming.stored(
            (f"{self._anatomy.embedding}.weight", f"{self._anatomy.head}.weight")
        )
        tied = self.config.tie_word_embeddings or head not in self.checkpoint.names()
        return embed, embed if tied else head

    def _norm(self) -> nn.Module:
        norm: nn.Module = copy.deepcopy(getattr(self._decoder, self._anatomy.norm))
        self._fill(norm, f"{self._anatomy.decoder}.{self._anatomy.norm}.")
        return (fast_norm(norm) if self.fused else norm).eval()

    def _fill(self, module: nn.Module, prefix: str, split: Split | None = None) -> None:
        """Load ``module``, or this process's share of it."""
        names = [name for name in self._state_names if name.startswith(prefix)]
        tensors = self._naming.read(names)
        if self.change is not None:
            tensors = {name: self.change(name, tensor) for name, tensor in tensors.items()}
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        plan = split.plan(self) if split else {}
        if split:
            split.shrink(module, plan)
            state = {name: split.share(name, tensor, plan) for name, tensor in state.items()}
        try:
            module.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"The tensors under {prefix!r} in {self.checkpoint.folder} do not fit config.json: "
                f"{str(error).splitlines()[-1].strip()} Download the model again."
            ) from error
        module.requires_grad_(False)
        if split:
            split.join(module, plan)
        convert(module, self.precision, fused=self.fused)
        if self.precision.linears != "plain":
            trim()


def _config_of(checkpoint: Checkpoint) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if checkpoint.config_dict["model_type"] not in CONFIG_MAPPING:
        raise _unsupported(checkpoint, "the installed version of transformers does not know it")
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library has many ways to say that a config is wrong
        raise _wrong_config(checkpoint, error) from error


def _skeleton(checkpoint: Checkpoint, config: Any) -> Any:
    """The whole model without memory for its tensors."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _unsupported(checkpoint, "it is not a model that writes text from left to right")
        # Some families' attention does what the fused kernel can't, such as capping scores.
        fits = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
        config._attn_implementation = "sdpa" if fits else "eager"
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except CheckpointError:
        raise
    except Exception as error:
        raise _wrong_config(checkpoint, error) from error


def _wrong_config(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder / 'config.json'} does not describe a model that can be built "
        f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}). "
        "Download the model again, or correct the file."
    )


def _unsupported(checkpoint: Checkpoint, reason: str) -> CheckpointError:
    return CheckpointError(
        f"Model family {checkpoint.config_dict['model_type']!r} in {checkpoint.folder} is not supported: "
        f"{reason}. Supported: {', '.join(FAMILIES)}, and others that pass a check when they are loaded."
    )
