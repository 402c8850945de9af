"""A whole decoder layer in few operations: the last step of :mod:`aparte.model.fuse`.

On a CPU a step of a few nodes spends about as long between its operations as in them. Where a layer's parts
were all replaced already and it has the plain shape (norm, attention with half-rotated positions, norm,
gated feed-forward), this module calls them one after the other, without the library's layers of calls in
between, and rotates queries and keys together. A layer of any other shape, or whose results differ,
stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from aparte.model.attention import shared_heads
from aparte.model.cache import SlotCache
from aparte.model.fuse import FusedGated, Part
from aparte.model.invariant import FixedRows
from aparte.model.linear import Bfloat16Linear, Int8Linear, PackedLinear
from aparte.model.paths import Paths
from aparte.step import ROOT, Step, chain_parents

ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
PARTS = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")


class FastLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    #: Its attention computes for several sessions (:func:`aparte.model.attention.by_session`).
    takes_sessions = True

    def __init__(self, layer: nn.Module) -> None:
        """``layer`` has the shape that :func:`fast_layer` checks."""
        super().__init__()
        attention: Any = layer.self_attn
        self._before: nn.Module = layer.input_layernorm  # type: ignore[assignment]
        self._between: nn.Module = layer.post_attention_layernorm  # type: ignore[assignment]
        self._feed: nn.Module = layer.mlp  # type: ignore[assignment]
        self._project: PackedLinear | FixedRows = attention.q_proj.together.linear
        self._leave: nn.Module = attention.o_proj
        self.is_causal = bool(attention.is_causal)
        self._index = int(attention.layer_idx)
        self._scaling = float(attention.scaling)
        self._size = int(attention.head_dim)
        width, shared = attention.q_proj.together.widths[:2]
        self._heads = [width // self._size, shared // self._size]

    def forward(
        self,
        states: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        **_: Any,
    ) -> torch.Tensor:
        """``[1, n, D] -> [1, n, D]``; the arguments are those of the library's layers."""
        nodes = states.shape[1]
        heads = self._project(self._before(states)).view(1, nodes, -1, self._size).transpose(1, 2)
        rotating, values = torch.split(heads, [sum(self._heads), self._heads[1]], dim=1)
        queries, keys = torch.split(_rotate(rotating, *position_embeddings), self._heads, dim=1)
        keys, values = cache.update(keys, values, self._index)
        attended, _none = shared_heads(self, queries, keys, values, attention_mask, self._scaling)
        states = self._leave(attended.reshape(1, nodes, -1)).add_(states)
        result: torch.Tensor = self._feed(self._between(states)).add_(states)
        return result


def fast_layer(layer: nn.Module, rotary: nn.Module) -> nn.Module:
    """The same layer in fewer operations; ``layer`` itself if it isn't one, by its shape and its results."""
    if not _is_plain(layer):
        return layer
    fast = FastLayer(layer)
    # Layers of other families may look alike and do something else (scale the residual, rotate in pairs).
    return fast if same_results(layer, fast, rotary) else layer


def same_results(layer: nn.Module, other: nn.Module, rotary: nn.Module, *, by_paths: bool = False) -> bool:
    """Whether both layers compute the same, of which one or both are a :class:`FastLayer`; ``other`` is given
    paths for a mask if it takes them."""
    project = next(each._project for each in (other, layer) if isinstance(each, FastLayer))
    linear = project.linear if isinstance(project, FixedRows) else project
    width = project.in_features
    probe = torch.linspace(-2, 3, 6 * width).view(1, 6, width).sin()
    if isinstance(linear, Bfloat16Linear):
        probe = probe.bfloat16()
    expected, got = _run(layer, rotary, probe).float(), _run(other, rotary, probe, by_paths).float()
    # A last bit may tip what comes in to the next 8-bit number, which is a step of that size.
    coarse = isinstance(linear, Int8Linear | Bfloat16Linear)
    near = 0.05 * float(expected.abs().max()) if coarse else 1e-4
    return torch.allclose(expected, got, atol=near)


def _is_plain(layer: nn.Module) -> bool:
    if sorted(name for name, _ in layer.named_children()) != sorted(PARTS):
        return False
    attention: Any = layer.self_attn
    if sorted(name for name, _ in attention.named_children()) != sorted(ATTENTION):
        return False
    return isinstance(attention.q_proj, Part) and isinstance(layer.mlp, FusedGated)


@torch.inference_mode()
def _run(layer: nn.Module, rotary: nn.Module, states: torch.Tensor, by_paths: bool = False) -> torch.Tensor:
    """``layer`` on its own over a chain of nodes, ``[1, n, D] -> [1, n, D]``."""
    nodes = states.shape[1]
    cache = SlotCache(_index_of(layer), 1, nodes)
    layout = cache.begin(Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, nodes)))
    mask = torch.full((1, 1, nodes, nodes), float("-inf"), dtype=states.dtype).triu(1)
    positions = torch.arange(nodes)[None]
    output: Any = layer(
        states,
        attention_mask=Paths(layout) if by_paths else mask,
        position_ids=positions,
        position_embeddings=rotary(states, position_ids=positions),
        cache=cache,
        use_cache=True,
    )
    return output if isinstance(output, torch.Tensor) else output[0]


def _index_of(layer: nn.Module) -> int:
    index: Any = getattr(layer, "_index", None)
    return int(layer.self_attn.layer_idx if index is None else index)  # type: ignore[union-attr,arg-type]


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[1, H, n, hd]`` with ``cos`` and ``sin`` ``[1, n, hd]``: the dimension ``i`` of
    the first half and of the second are turned together."""
    low, high = heads.chunk(2, dim=-1)
    sin_low, sin_high = sin[:, None].chunk(2, dim=-1)
    turned = heads * cos[:, None]
    turned_low, turned_high = turned.chunk(2, dim=-1)
    turned_low.addcmul_(high, sin_low, value=-1)
    turned_high.addcmul_(low, sin_high)
    return turned
