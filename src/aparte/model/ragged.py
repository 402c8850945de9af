"""Rows of several sessions in one forward pass.

Linear layers and norms treat every row by itself, so they run over the rows of all sessions at once. Only
attention knows whose row is whose. :class:`SharedCache` stands where a layer expects its cache: it hands
every session's new rows to that session's own cache and returns the sessions' keys and values side by side,
as :class:`Ragged`. The layers pass that on unopened, to an attention that computes one session after the
other (:mod:`aparte.model.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from aparte.model.cache import SlotCache


class Ragged:
    """Keys or values of several sessions, each ``[1, H, total_i, head_dim]``.

    ``rows[i]`` is how many of the pass's rows, in this order, belong to session ``i``.
    """

    __slots__ = ("parts", "rows")

    def __init__(self, parts: Sequence[torch.Tensor], rows: list[int]) -> None:
        self.parts = parts
        self.rows = rows


class SharedCache:
    """The caches of the sessions of one pass, as the one cache that the layers see."""

    def __init__(self, caches: Sequence[SlotCache], rows: Sequence[int]) -> None:
        self._caches = caches
        self._rows = list(rows)

    def sessions(self) -> Iterator[tuple[SlotCache, slice]]:
        """Each session's cache, and which of the pass's rows are its own."""
        end = 0
        for cache, count in zip(self._caches, self._rows, strict=True):
            end += count
            yield cache, slice(end - count, end)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Ragged, Ragged]:
        """Store everybody's new rows, ``[1, H, sum n_i, head_dim]``; return what everybody attends to."""
        stored = [
            cache.update(own_keys, own_values, layer_idx)
            for cache, own_keys, own_values in zip(
                self._caches,
                torch.split(keys, self._rows, dim=2),
                torch.split(values, self._rows, dim=2),
                strict=True,
            )
        ]
        return Ragged([pair[0] for pair in stored], self._rows), Ragged(
            [pair[1] for pair in stored], self._rows
        )
