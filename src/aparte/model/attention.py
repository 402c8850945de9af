"""The attention of the fast path, as an implementation that ``transformers`` calls by name.

The library's own (``sdpa``) repeats keys and values for every query head as soon as there is a mask:
a copy of the whole cache, three times its size for the default model, per layer and step. The kernel
below can share them among heads, and does the same arithmetic: the results are equal to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: The name to put into ``config._attn_implementation``.
NAME = "aparte"


def shared_heads(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[B, H, n, hd]``, ``key`` and ``value`` ``[B, kv, total, hd]``; returns ``[B, n, H, hd]``.

    ``attention_mask`` is bool, or added to the scores, ``[B or 1, 1, n, total]``. What else the caller says
    (a sliding window) is in the mask already. Several nodes without a mask are causal, as in ``sdpa``.
    """
    batch, heads, nodes, size = query.shape
    if nodes == 1:
        # Heads that share keys become rows of one query, for which the kernel reads the cache once.
        grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
        output = nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
        return output.reshape(batch, 1, heads, size), None
    causal = attention_mask is None and bool(getattr(module, "is_causal", True))
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


def register() -> None:
    """Make :data:`NAME` known to ``transformers``. May be called any number of times."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, shared_heads)
