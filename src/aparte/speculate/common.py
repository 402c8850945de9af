"""The *common* source: what usually follows a token, or two, in what this model writes.

A table made once from conversations that the model wrote with itself (``benchmarks/common_table.py``), for
models that one ships for. It is to the *recycling* source what a warm start is to a cold one, without
holding anything of what a user ever said.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from aparte.config import DEFAULT_MODEL
from aparte.errors import UserError
from aparte.speculate.drafter import Outcome
from aparte.speculate.source import Candidate

#: Next tokens kept per key.
KEPT = 6
SHIPPED = Path(__file__).with_name("common.safetensors")

Place = tuple[int, int]  # the last two tokens
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CommonTable:
    """Keys in increasing order; of each its next tokens ``[n, KEPT]``, best first, and their mean shares.

    A key of ``two`` is the first token times 2^32 plus the second one.
    """

    one_keys: Array
    one_tokens: Array
    one_shares: Array
    two_keys: Array
    two_tokens: Array
    two_shares: Array

    def save(self, path: Path) -> None:
        save_file({name: getattr(self, name) for name in self.__dataclass_fields__}, path)

    @classmethod
    def load(cls, path: Path) -> CommonTable:
        arrays = load_file(path)
        return cls(*(arrays[name] for name in cls.__dataclass_fields__))

    def after_one(self, token: int) -> list[tuple[int, float]]:
        """Next tokens and shares, best first; empty if nothing is known."""
        return _row(self.one_keys, self.one_tokens, self.one_shares, token)

    def after_two(self, place: Place) -> list[tuple[int, float]]:
        return _row(self.two_keys, self.two_tokens, self.two_shares, pair_key(*place))


def pair_key(first: int, second: int) -> int:
    """The key of two tokens in a row."""
    return (first << 32) + second


def _row(keys: Array, tokens: Array, shares: Array, key: int) -> list[tuple[int, float]]:
    index = int(keys.searchsorted(key))
    if index == len(keys) or keys[index] != key:
        return []
    return list(zip(tokens[index].tolist(), shares[index].tolist(), strict=True))


@functools.cache
def shipped_table(name: str) -> CommonTable | None:
    """The table of the model called ``name``, if one ships."""
    return CommonTable.load(SHIPPED) if name == DEFAULT_MODEL and SHIPPED.exists() else None


def common_table(name: str) -> CommonTable:
    """The same. Raises :class:`UserError` if there is none."""
    table = shipped_table(name)
    if table is None:
        raise UserError(f"There is no table of the common source for {name}. Leave common out.")
    return table


class Common:
    """The source: two tokens first, one token besides."""

    def __init__(self, table: CommonTable) -> None:
        self._table = table

    def start(self, context: Sequence[int]) -> Place:
        return (context[-2] if len(context) > 1 else 0, context[-1])

    def candidates(self, place: Place) -> list[Candidate]:
        found: dict[int, Candidate] = {}
        for name, row, trust in (
            ("two", self._table.after_two(place), 0.9),
            ("one", self._table.after_one(place[1]), 0.7),
        ):
            for rank, (token, share) in enumerate(row):
                if token not in found and share > 0:
                    found[token] = Candidate(token, (f"common-{name}", rank, int(share * 4)), trust * share)
        return list(found.values())

    def advance(self, place: Place, token: int) -> Place:
        return place[1], token

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        """Nothing: the table is the same for everybody."""


def make_table(
    ones: Array, twos: Array, tokens: Array, shares: Array, most_pairs: int, least: int = 2
) -> CommonTable:
    """The table of many places: their last token ``[n]`` and key of two ``[n]``, and the likeliest next
    tokens ``[n, k]`` with their shares there. Pairs seen fewer than ``least`` times are left out."""
    one = _means(ones, tokens, shares, len(ones), 1)
    two = _means(twos, tokens, shares, most_pairs, least)
    return CommonTable(*one, *two)


def _means(keys: Array, tokens: Array, shares: Array, most: int, least: int) -> tuple[Array, Array, Array]:
    """Per key, the tokens with the largest mean share."""
    distinct, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    keep = np.flatnonzero(counts >= least)
    keep = np.sort(keep[np.argsort(-counts[keep], kind="stable")[:most]])
    # Sum the shares by (key, token), then order by key and falling sum.
    pairs = inverse.reshape(-1, 1).astype(np.int64) * (1 << 32) + tokens
    together, where = np.unique(pairs.ravel(), return_inverse=True)
    sums = np.bincount(where.ravel(), weights=shares.ravel().astype(np.float64))
    order = np.lexsort((-sums, together >> 32))
    together, sums = together[order], sums[order]
    starts = np.searchsorted(together >> 32, keep)
    ends = np.searchsorted(together >> 32, keep, side="right")
    rows_tokens = np.zeros((len(keep), KEPT), dtype=np.int32)
    rows_shares = np.zeros((len(keep), KEPT), dtype=np.float16)
    for row, (key, start, end) in enumerate(zip(keep, starts, ends, strict=True)):
        width = min(KEPT, end - start)
        rows_tokens[row, :width] = together[start : start + width] & 0xFFFFFFFF
        rows_shares[row, :width] = sums[start : start + width] / counts[key]
    return distinct[keep], rows_tokens, rows_shares
