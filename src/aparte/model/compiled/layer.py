"""A plain decoder layer that is compiled between its linears (:mod:`aparte.model.compiled.kernels`).

It stands where a :class:`~aparte.model.layer.FastLayer` would, computes the same from the same parts, and is
used where Numba is installed, for linears that take float32 on a CPU. Steps of many nodes, and those whose
attention it doesn't know, leave attention to the library's kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from aparte.model.attention import shared_heads
from aparte.model.cache import SlotCache
from aparte.model.compiled import kernels
from aparte.model.compiled.walk import walk_of
from aparte.model.fuse import FastNorm, FusedGated
from aparte.model.invariant import FixedRows
from aparte.model.layer import FastLayer, same_results
from aparte.model.linear import Int8Linear, PackedLinear
from aparte.model.paths import Paths
from aparte.model.ragged import SharedCache

Array = npt.NDArray[Any]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Arrays = tuple[Array, Array, Array, int]


class Product:
    """A linear as the kernels use it: what it reads is scaled for it, and what it gives has factors."""

    def __init__(self, linear: PackedLinear | FixedRows) -> None:
        packed = linear.linear if isinstance(linear, FixedRows) else linear
        self.width, self.outputs = packed.in_features, packed.out_features
        #: Largest integer that it reads, or 0 if it takes numbers as they are.
        self.levels = packed.levels if isinstance(packed, Int8Linear) else 0
        #: Their type.
        self.reads = packed.reads if isinstance(packed, Int8Linear) else torch.float32
        bias = packed.bias if isinstance(packed, Int8Linear) else None
        self.bias: Array = np.zeros(self.outputs, np.float32) if bias is None else bias.numpy()
        self._multiply: Callable[[torch.Tensor], torch.Tensor] = (
            packed.multiplier() if isinstance(packed, Int8Linear) else linear
        )

    def of(self, rows: torch.Tensor) -> Array:
        """``[n, in_features] -> [n, out_features]``."""
        return self._multiply(rows).numpy()


Room = tuple[torch.Tensor, Array, Array]


def _room(nodes: int, product: Product) -> Room:
    rows = torch.empty(nodes, product.width, dtype=product.reads)
    return rows, rows.numpy(), np.empty(nodes, np.float32)


class Rooms:
    """What a step of ``nodes`` goes through on its way, the same memory in all layers of a shape."""

    def __init__(self, nodes: int, layer: CompiledLayer) -> None:
        #: What each product reads, as a tensor and as an array, and the factors that belong to it.
        self.to_project, self.to_leave, self.to_enter, self.to_down = (
            _room(nodes, product) for product in (layer.project, layer.leave, layer.enter, layer.down)
        )
        self.between = np.empty((nodes, layer.enter.width), np.float32)
        heads = torch.empty(1, nodes, layer.count, layer.size)
        keys, values = (torch.empty(1, layer.shared, nodes, layer.size) for _ in range(2))
        self.heads = heads, keys, values
        self.head_arrays = _arrays(self.heads)
        self.attended = np.empty((nodes, layer.count, layer.size), np.float32)
        self._after: tuple[torch.Tensor, Array] | None = None
        self._rotary: tuple[torch.Tensor, tuple[Array, ...]] | None = None

    def before(self, states: torch.Tensor) -> Array:
        """``states`` ``[1, n, D]`` as an array ``[n, D]``."""
        if self._after is not None and self._after[0] is states:
            return self._after[1]
        array: Array = states.contiguous().numpy()[0]
        return array

    def after(self) -> tuple[torch.Tensor, Array]:
        """A tensor for what comes out of a layer ``[1, n, D]``, and its array ``[n, D]``."""
        states = torch.empty(1, *self.between.shape)
        self._after = states, states.numpy()[0]
        return self._after

    def rotary(self, rotary: tuple[torch.Tensor, torch.Tensor]) -> tuple[Array, ...]:
        """Cosines and sines ``[n, hd]``, turned into arrays once for all layers."""
        if self._rotary is None or self._rotary[0] is not rotary[0]:
            self._rotary = rotary[0], tuple(part[0].contiguous().numpy() for part in rotary)
        return self._rotary[1]


class _Kept(threading.local):
    """The rooms of the newest step of this thread, which layer after layer goes through."""

    key: tuple[Any, ...] | None = None
    rooms: Rooms | None = None


#: Rooms of larger steps are not kept: they are large, and such a step doesn't notice.
_MOST_KEPT = 64
_KEPT = _Kept()


def _rooms(nodes: int, layer: CompiledLayer) -> Rooms:
    if nodes > _MOST_KEPT:
        return Rooms(nodes, layer)
    key = (nodes, layer.shape)
    if _KEPT.rooms is None or _KEPT.key != key:
        _KEPT.key, _KEPT.rooms = key, Rooms(nodes, layer)
    return _KEPT.rooms


class CompiledLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    #: It computes for several sessions, each as if it were alone.
    takes_sessions = True
    #: It takes :class:`~aparte.model.paths.Paths` in the place of a mask.
    walks_paths = True

    def __init__(self, layer: FastLayer) -> None:
        super().__init__()
        self._plain = layer
        self.is_causal = layer.is_causal
        feed: FusedGated = layer._feed  # type: ignore[assignment]
        self._before, self._between = _norm(layer._before), _norm(layer._between)
        self.project, self.leave = Product(layer._project), Product(layer._leave)  # type: ignore[arg-type]
        self.enter, self.down = Product(feed._gate_up), Product(feed._down)
        self.count, self.shared = layer._heads
        self.size = layer._size
        linears = (self.project, self.leave, self.enter, self.down)
        #: What :class:`Rooms` go by.
        self.shape = (self.count, self.shared, self.size, *((each.width, each.reads) for each in linears))
        self._index, self._scaling = layer._index, layer._scaling

    def forward(
        self,
        states: torch.Tensor,
        *,
        attention_mask: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        **_: Any,
    ) -> torch.Tensor:
        """``[1, n, D] -> [1, n, D]``; the arguments are those of the library's layers."""
        rooms = _rooms(states.shape[1], self)
        before = rooms.before(states)
        rows, room, factors = rooms.to_project
        kernels.normed(before, *self._before, self.project.levels, room, factors)
        rotary = rooms.rotary(position_embeddings)
        products = self.project.of(rows)
        kernels.heads(products, factors, self.project.bias, *rotary, *rooms.head_arrays[:3])

        rows, room, factors = rooms.to_leave
        kernels.scaled(self._attend(cache, rooms, attention_mask), self.leave.levels, room, factors)
        kernels.added(before, self.leave.of(rows), factors, rooms.between)

        rows, room, factors = rooms.to_enter
        kernels.normed(rooms.between, *self._between, self.enter.levels, room, factors)
        products = self.enter.of(rows)
        rows, room, down_factors = rooms.to_down
        kernels.gated(products, factors, self.down.levels, room, down_factors)
        after, after_rows = rooms.after()
        kernels.added(rooms.between, self.down.of(rows), down_factors, after_rows)
        return after

    def _attend(self, cache: Any, rooms: Rooms, seen: Any) -> Array:
        """What the rooms' queries find, ``[n, H hd]``."""
        if not isinstance(cache, SharedCache):
            return self._look(cache, rooms.heads, rooms.head_arrays, seen, rooms.attended)
        queries, keys, values = rooms.heads
        found = []
        for (own, of), paths in zip(cache.sessions(), seen, strict=True):
            heads = queries[:, of], keys[:, :, of].contiguous(), values[:, :, of].contiguous()
            result = np.empty_like(heads[0].numpy()[0])
            found.append(self._look(own, heads, _arrays(heads), paths, result))
        return np.concatenate(found)

    def _look(self, cache: SlotCache, heads: Heads, arrays: Arrays, seen: Any, result: Array) -> Array:
        """Queries ``[1, n, H, hd]`` over all keys and values, of which ``[1, kv, n, hd]`` are new; what they
        find ``[n, H hd]``. ``seen`` is a mask, or paths."""
        queries, keys, values = heads
        nodes = queries.shape[1]
        key_rows, value_rows, first = cache.room(keys, values, self._index)
        old_keys, old_values = key_rows.raw, value_rows.raw
        if old_keys is None or old_values is None:
            read = [key_rows.store(keys, first), value_rows.store(values, first)]
        else:
            _, *new, address = arrays
            if old_keys.scaled:
                scales = old_keys.scales, old_values.scales
                kernels.store_scaled(*new, old_keys.rows, old_values.rows, *scales, first)
            else:
                kernels.store(*new, old_keys.rows, old_values.rows, first)
            if isinstance(seen, Paths):
                walk = walk_of(seen, self.count, self.shared, self.size, self._scaling)
                walk.attend(address, old_keys, old_values, result)
                return result.reshape(nodes, -1)
            read = [place.read(first + nodes, keys.dtype) for place in (key_rows, value_rows)]
        attended, _ = shared_heads(self, queries.transpose(1, 2), *read, seen, self._scaling)
        return attended.reshape(nodes, -1).numpy()


def replaced(layers: Sequence[nn.Module], rotary: nn.Module) -> list[nn.Module]:
    """The same layers compiled; ``layers`` as they are if not all of them can be, by shape and by results."""
    if not all(isinstance(layer, FastLayer) and _fits(layer) for layer in layers):
        return list(layers)
    compiled: list[nn.Module] = [CompiledLayer(layer) for layer in layers]  # type: ignore[arg-type]
    same = all(same_results(layers[0], compiled[0], rotary, by_paths=by_paths) for by_paths in (False, True))
    return compiled if same else list(layers)


def _fits(layer: FastLayer) -> bool:
    linears = [layer._project, layer._leave]
    if not isinstance(layer._feed, FusedGated) or not isinstance(layer._before, FastNorm):
        return False
    if not isinstance(layer._between, FastNorm) or layer._size % 2:
        return False
    linears += [layer._feed._gate_up, layer._feed._down]
    packed = [linear.linear if isinstance(linear, FixedRows) else linear for linear in linears]
    if not all(isinstance(linear, PackedLinear) and linear.takes == torch.float32 for linear in packed):
        return False
    if any(isinstance(linear, Int8Linear) and linear.bias is not None for linear in packed[1:]):
        return False
    probe = torch.linspace(-9, 9, 64)
    return torch.allclose(layer._feed._act(probe), nn.functional.silu(probe), atol=1e-6)


def _arrays(heads: Heads) -> Arrays:
    """The same memory, without the first dimension, and where the queries begin."""
    queries, keys, values = (each.numpy()[0] for each in heads)
    return queries, keys, values, queries.ctypes.data


def _norm(norm: nn.Module) -> tuple[Array, np.float32]:
    assert isinstance(norm, FastNorm)
    return norm._weight.numpy(), np.float32(norm._floor)
