"""What decoder layers are given for a step: positions, rotary embeddings, and masks over the token tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aparte.model.tree import Layout

HIDDEN = float("-inf")


@dataclass(frozen=True)
class Inputs:
    """What the layers are given, of one session or of several."""

    states: torch.Tensor  # [1, n, D]
    positions: torch.Tensor  # [1, n]
    rotary: Mapping[str | None, tuple[torch.Tensor, ...]]  # cosines and sines, [1, n, head_dim], by kind
    masks: Mapping[int | None, Any]  # by sliding window


def joined(inputs: Sequence[Inputs]) -> Inputs:
    """The rows of several sessions one after the other; their masks side by side."""
    return Inputs(
        torch.cat([each.states for each in inputs], dim=1),
        torch.cat([each.positions for each in inputs], dim=1),
        {
            kind: tuple(
                torch.cat(parts, dim=1) for parts in zip(*(each.rotary[kind] for each in inputs), strict=True)
            )
            for kind in inputs[0].rotary
        },
        {window: [each.masks[window] for each in inputs] for window in inputs[0].masks},
    )


def sees_all(layout: Layout, window: int | None) -> bool:
    """Whether every node sees every row. With several nodes that can't be."""
    return layout.sees_everything and (window is None or max(layout.positions) < window)


def mask(layout: Layout, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Who sees whom, ``[n, total]``: 0 for what a node sees, -inf for the rest.

    It is added to the scores. A bool mask would be turned into that by every layer anew. A node sees the
    committed prefix, its ancestors and itself; with a sliding window only those closer than ``window``
    positions, as ``transformers`` counts too.
    """
    shown = torch.zeros(len(layout.positions), layout.total, dtype=dtype, device=device)
    shown[:, layout.prefix :].masked_fill_(torch.from_numpy(~layout.ancestors).to(device), HIDDEN)
    if window is not None:
        depths = torch.cat([torch.arange(layout.prefix), torch.from_numpy(layout.pending_depths)])
        oldest = torch.tensor(layout.positions)[:, None] - window
        shown.masked_fill_((depths <= oldest).to(device), HIDDEN)
    return shown
