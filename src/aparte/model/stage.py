"""Stages: a contiguous run of decoder layers over a token tree.

The layers are those of Hugging Face ``transformers``; this module derives from a
:class:`~aparte.step.Step` what they need: positions, rotary embeddings and one explicit attention mask
per kind of layer (paper A, section 4.2, has the client send these; here they never cross the wire).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from aparte.model.cache import SlotCache
from aparte.model.tree import Layout
from aparte.step import Step


class Stage:
    """Decoder layers ``first_layer ..`` with their rotary embedding; caches are per session."""

    def __init__(
        self,
        layers: nn.ModuleList,
        rotary: nn.Module,
        *,
        first_layer: int,
        windows: tuple[int | None, ...],
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``windows[i]`` is the sliding window of the i-th layer of this stage, None for full attention."""
        self._layers = layers
        self._rotary = rotary
        self._windows = windows
        self._first_layer = first_layer
        self.max_context = max_context
        self.dtype = dtype
        self.device = device

    @property
    def layer_indices(self) -> range:
        """Which layers of the model these are."""
        return range(self._first_layer, self._first_layer + len(self._layers))

    def new_cache(self, max_pending: int = 4096) -> SlotCache:
        """An empty cache for one session, for a full context and ``max_pending`` nodes below it."""
        return SlotCache(self._first_layer, len(self._layers), self.max_context + max_pending)

    @torch.inference_mode()
    def forward(self, cache: SlotCache, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layers over the step's nodes: ``[n, D] -> [n, D]``, in this stage's dtype."""
        layout = cache.begin(step)
        states = hidden.to(self.device, self.dtype).unsqueeze(0)  # [1, n, D]
        positions = torch.tensor([layout.positions], device=self.device)  # [1, n]
        rotary = self._rotary(states, position_ids=positions)
        masks = {window: self._mask(layout, positions[0], window) for window in set(self._windows)}
        for layer, window in zip(self._layers, self._windows, strict=True):
            output: Any = layer(
                states,
                attention_mask=masks[window],
                position_ids=positions,
                position_embeddings=rotary,
                cache=cache,
                use_cache=True,
            )
            states = output if isinstance(output, torch.Tensor) else output[0]
        return states.squeeze(0)

    def _mask(self, layout: Layout, positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """Who sees whom, ``[1, 1, n, total]``, or None if everybody sees everything.

        It is added to the scores: 0 for what a node sees, -inf for the rest. A bool mask would be turned
        into that by every layer anew. A node sees the committed prefix, its ancestors and itself; with a
        sliding window only those closer than ``window`` positions, as ``transformers`` counts too.
        """
        if layout.sees_everything and (window is None or max(layout.positions) < window):
            # One node that sees all rows: attention needs no mask. (With several nodes this can't be.)
            return None
        mask = torch.zeros(len(positions), layout.total, dtype=self.dtype, device=self.device)
        hidden = torch.from_numpy(~layout.ancestors).to(self.device)
        mask[:, layout.prefix :].masked_fill_(hidden, float("-inf"))
        if window is not None:
            depths = torch.cat([torch.arange(layout.prefix), torch.from_numpy(layout.pending_depths)]).to(
                self.device
            )
            mask.masked_fill_(depths <= positions[:, None] - window, float("-inf"))
        return mask[None, None]
