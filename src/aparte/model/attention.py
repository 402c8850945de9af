"""Attention as implementations that ``transformers`` calls by name.

The library's own (``sdpa``) repeats keys and values for every query head as soon as there is a mask:
a copy of the whole cache, three times its size for the default model, per layer and step. The kernel
below can share them among heads, and does the same arithmetic: the results are equal to the bit. The
library's own stays where it is the faster one, which is on a GPU.

Either can be given the keys and values of several sessions at once (:mod:`aparte.model.ragged`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aparte.model import pieces
from aparte.model.invariant import Visible
from aparte.model.ragged import Ragged

#: What some families' attention does besides, and the kernel below can't. They use the library's ``eager``.
BEYOND = ("softcap", "s_aux", "position_bias")

#: The name of :func:`shared_heads`, to put into ``config._attn_implementation``.
NAME = "aparte"
#: The name of the library's own attention, for several sessions too.
STOCK = "aparte-stock"

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def by_session(attention: Attention) -> Attention:
    """``attention``, which may also get the keys and values of several sessions and a mask for each.

    Then it computes one session after the other, each exactly as if it were alone.
    """

    @functools.wraps(attention)
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | Ragged,
        value: torch.Tensor | Ragged,
        attention_mask: Any,
        *more: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(key, Ragged) or not isinstance(value, Ragged):
            return attention(module, query, key, value, attention_mask, *more, **options)
        outputs = [
            attention(module, *session, *more, **options)[0]
            for session in zip(
                torch.split(query, key.rows, dim=2), key.parts, value.parts, attention_mask, strict=True
            )
        ]
        return torch.cat(outputs, dim=1), None

    return attend


@by_session
def shared_heads(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Visible | None,
    scaling: float,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[B, H, n, hd]``, ``key`` and ``value`` ``[B, kv, total, hd]``; returns ``[B, n, H, hd]``.

    ``attention_mask`` is bool, or added to the scores, ``[B or 1, 1, n, total]``. What else the caller says
    (a sliding window) is in the mask already. Several nodes without a mask are causal, as in ``sdpa``.
    """
    if more and (beyond := [name for name in BEYOND if more.get(name) is not None]):
        raise NotImplementedError(f"This attention cannot apply {beyond[0]}.")
    batch, heads, nodes, size = query.shape
    if isinstance(attention_mask, Visible):
        if key.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
            return attention_mask.attend(query, key, value, scaling), None
        alone = [
            shared_heads(module, query[:, :, node : node + 1], *rows, None, scaling)[0]
            for node, rows in enumerate(attention_mask.of_each(key, value))
        ]
        return torch.cat(alone, dim=1), None
    if pieces.worthwhile(query, key, value, attention_mask):
        return pieces.attend(query, key, value, attention_mask, scaling), None
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


def install(layer: nn.Module, name: str) -> None:
    """Point the modules of ``layer`` that look up ``sdpa`` to ``name``, in a copy of their configuration."""
    register()
    for module in layer.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            own = copy.copy(config)
            own._attn_implementation = name
            module.config = own


def takes_sessions(layer: nn.Module) -> bool:
    """True if all attention in ``layer`` can compute for several sessions: it is one of these here, and the
    layer says so itself or names it in a configuration."""
    if getattr(layer, "takes_sessions", False):
        return True
    return _uses(layer, (NAME, STOCK))


def goes_by_node(layer: nn.Module) -> bool:
    """True if all attention in ``layer`` takes :class:`~aparte.model.invariant.Visible`."""
    return isinstance(getattr(layer, "takes_sessions", None), bool) or _uses(layer, (NAME,))


def _uses(layer: nn.Module, names: tuple[str, ...]) -> bool:
    configs = [module.config for module in layer.modules() if hasattr(module, "config")]
    return bool(configs) and all(getattr(config, "_attn_implementation", None) in names for config in configs)


def register() -> None:
    """Make the names known to ``transformers``. May be called any number of times."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(NAME, shared_heads)
    AttentionInterface.register(STOCK, by_session(sdpa_attention_forward))
