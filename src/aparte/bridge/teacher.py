"""The whole model, for training a bridge on a machine that holds all of it.

It runs rows of tokens side by side: one new token per row while it writes its own training text, and
whole sequences through the back while a bridge is trained. Nothing here is used while answering.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aparte.config import Cut
from aparte.model import attention


def training_dtype(device: torch.device, width: int) -> torch.dtype:
    """bfloat16 where this machine multiplies it faster than float32, which old CPUs don't."""
    if device.type != "cpu":
        return torch.bfloat16

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(256, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            left @ right
            best = min(best, time.perf_counter() - started)
        return best

    return torch.bfloat16 if seconds(torch.bfloat16) < seconds(torch.float32) else torch.float32


@dataclass(frozen=True)
class States:
    """Of one token per row: the front's output, the middle's, and the back's after the norm, ``[R, D]``."""

    front: torch.Tensor
    middle: torch.Tensor
    final: torch.Tensor


class RowsCache:
    """Keys and values of ``rows`` sequences of up to ``length`` tokens that grow in step.

    Decoder layers ask a cache for ``update`` only, as with :class:`aparte.model.cache.SlotCache`.
    """

    def __init__(self, rows: int, length: int) -> None:
        self._rows, self._length = rows, length
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.position = 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[R, H, 1, d]`` at the current position; return everything up to it."""
        if layer_idx not in self._buffers:
            shape = (self._rows, keys.shape[1], self._length, keys.shape[3])
            self._buffers[layer_idx] = keys.new_zeros(shape), values.new_zeros(shape)
        stored_keys, stored_values = self._buffers[layer_idx]
        end = self.position + 1
        stored_keys[:, :, self.position : end] = keys
        stored_values[:, :, self.position : end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]


class Teacher:
    """A Hugging Face causal model, taken apart at a cut."""

    def __init__(self, folder: Path, cut: Cut, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        attention.register()
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.dtype = training_dtype(device, config.hidden_size)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=self.dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=attention.NAME,
        )
        model.eval().requires_grad_(False).to(device)
        self.config: Any = model.config
        self.device = device
        decoder = model.get_decoder()
        self.embed: nn.Module = decoder.embed_tokens
        self.layers: nn.ModuleList = decoder.layers
        self.rotary: nn.Module = decoder.rotary_emb
        self.norm: nn.Module = decoder.norm
        #: Rows of the LM head, ``[V, D]``.
        self.head: torch.Tensor = model.get_output_embeddings().weight
        self.middle = cut.middle(len(self.layers))

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, cache: RowsCache) -> tuple[States, torch.Tensor]:
        """One token per row, ``[R] -> `` its states and the logits ``[R, V]`` of the next."""
        hidden = self.embed(tokens.unsqueeze(1))  # [R, 1, D]
        positions = torch.full((1, 1), cache.position, device=self.device)
        rotary = self.rotary(hidden, position_ids=positions)
        front = middle = hidden
        for index, layer in enumerate(self.layers):
            hidden = run_layer(layer, hidden, None, positions, rotary, cache)
            if index == self.middle.start - 1:
                front = hidden
            elif index == self.middle.stop - 1:
                middle = hidden
        cache.position += 1
        final = self.norm(hidden)
        states = States(front.squeeze(1), middle.squeeze(1), final.squeeze(1))
        return states, states.final @ self.head.T


def run_layer(
    layer: nn.Module,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor,
    rotary: Any,
    cache: Any,
) -> torch.Tensor:
    """One decoder layer over ``[B, T, D]``; ``mask`` ``[B or 1, 1, T, S]`` of bool, None for "sees all"."""
    output: Any = layer(
        hidden,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=rotary,
        cache=cache,
        use_cache=True,
    )
    result: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return result
