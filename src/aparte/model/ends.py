"""A model's ends: from token ids to the first layer's input, and from the last layer's output to logits."""

from __future__ import annotations

import torch
from torch import nn

from aparte.model.bits import bits_linear
from aparte.model.families import Finish
from aparte.model.invariant import fixed_rows
from aparte.model.linear import PACKED, packed_linear
from aparte.model.precision import Precision


class Embedding:
    """Token ids to hidden states."""

    def __init__(self, weight: torch.Tensor, precision: Precision, scale: float = 1.0) -> None:
        """Some families multiply their embeddings by a ``scale``."""
        self._scale = scale
        self._weight = weight.to(precision.device, precision.table)
        self._dtype = precision.dtype

    @property
    def nbytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[n]`` of int64 ``-> [n, D]``."""
        rows = nn.functional.embedding(tokens.to(self._weight.device), self._weight).to(self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale


class Head:
    """Final norm and LM head: hidden states to logits."""

    def __init__(
        self,
        norm: nn.Module,
        weight: torch.Tensor,
        precision: Precision,
        *,
        bias: torch.Tensor | None = None,
        finish: Finish | None = None,
    ) -> None:
        """``finish`` is what the family does to its logits in the end."""
        self._norm = norm
        self._finish = finish
        self._linear: nn.Module
        if precision.head in PACKED:
            self._linear = packed_linear(weight, bias, precision.head)
        elif precision.head == "bits8":
            self._linear = bits_linear(weight, bias, "int8", precision.device)
        else:
            self._linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
            for name, value in (("weight", weight), ("bias", bias)):
                if value is not None:
                    there = value.to(precision.device, precision.dtype)
                    setattr(self._linear, name, nn.Parameter(there, requires_grad=False))
        if precision.invariant:
            self._linear = fixed_rows(self._linear)

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, D] -> [n, V]`` in float32."""
        logits: torch.Tensor = self._linear(self._norm(hidden))
        return (logits if self._finish is None else self._finish(logits)).float()
