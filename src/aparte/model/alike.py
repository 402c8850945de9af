"""Trials of whether a kernel gives a row the same bits wherever it stands, and among how many others.

Libraries choose their kernels by the processor and by shapes, and not by the numbers that come in. So what a
trial with other numbers finds of a shape holds for it here; elsewhere the trial is made again. Its numbers
are such that every other order of adding up gives other bits: each product comes twice, with either sign, and
what is left of their sum is its errors of rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aparte.model.bits import BitsLinear
from aparte.model.linear import BLOCK as MOST_NUMBERS
from aparte.model.linear import TILE, Bfloat16Linear, PackedLinear
from aparte.model.pieces import weighted

#: Rows of a block, where any up to so many are alike,
ALIKE = 32
#: and where they are only among as many.
BLOCK = 8
#: Lengths of a text, in which places of queries are tried: all that the kernel, which takes 512 at a time, is
#: given for texts that are cut at multiples of 32, and then once more.
LENGTHS = range(32, 1025, 32)

_Multiply = Callable[[torch.Tensor], torch.Tensor]


def block_rows(linear: nn.Module) -> tuple[int, int]:
    """The least and the most rows of blocks in which a row of ``linear`` is the same at any place.

    A single one where no other number is.
    """
    width, threads = int(linear.in_features), torch.get_num_threads()  # type: ignore[arg-type]
    kind: Any = type(linear)
    if isinstance(linear, PackedLinear):
        parts = {len(part) for part in torch.empty(linear.out_features).split(linear.rows)}  # type: ignore[no-untyped-call]
        found = [_packed(kind, width, rows, linear.biased, threads) for rows in parts]
    else:
        # What multiplies on a CPU, after 4 bits were unpacked too. Other devices are not tried.
        weight = next(iter(linear.parameters()), torch.empty(0))
        if weight.device.type != "cpu" or (isinstance(linear, BitsLinear) and linear.device.type != "cpu"):
            return BLOCK, BLOCK
        rows = int(linear.out_features)  # type: ignore[arg-type]
        biased = bool(linear.biased if isinstance(linear, BitsLinear) else linear.bias is not None)
        if rows * width <= MOST_NUMBERS:
            found = [_plain(weight.dtype, width, rows, biased, threads)]
        else:
            found = [_large(linear, (kind, weight.dtype, width, rows, biased, threads))]
    return max(least for least, _ in found), min(most for _, most in found)


@functools.cache
def queries_alike(size: int, dtype: torch.dtype, rows: int, _threads: int) -> bool:
    """Whether the attention kernel gives each of ``rows`` queries of ``size`` the same at any place."""
    generator = torch.Generator().manual_seed(0)

    def numbers(count: int) -> torch.Tensor:
        return torch.randn(2, 2, count, size, generator=generator).to(dtype)

    for length in LENGTHS:
        query, key, value = numbers(rows), numbers(length // 2), numbers(length // 2)
        key, value = torch.cat([key, key], dim=2), torch.cat([value, -value], dim=2)
        expected = weighted(query, key, value, None, 0.2)
        moved = weighted(query.roll(1, 2), key, value, None, 0.2)
        if not all(torch.equal(one.roll(-1, 2), other) for one, other in zip(moved, expected, strict=True)):
            return False
    return True


@functools.cache
def _packed(kind: type[PackedLinear], width: int, rows: int, biased: bool, _threads: int) -> tuple[int, int]:
    def make(weight: torch.Tensor) -> _Multiply:
        return kind(weight, torch.zeros(rows) if biased else None)

    return _trial(make, kind.takes, width, rows, TILE if issubclass(kind, Bfloat16Linear) else BLOCK)


@functools.cache
def _plain(dtype: torch.dtype, width: int, rows: int, biased: bool, _threads: int) -> tuple[int, int]:
    def make(weight: torch.Tensor) -> _Multiply:
        bias = torch.zeros(rows, dtype=dtype) if biased else None
        return functools.partial(nn.functional.linear, weight=weight.to(dtype), bias=bias)

    return _trial(make, dtype, width, rows, BLOCK)


#: What was found of large linears, by all that kernels are chosen by.
_LARGE: dict[tuple[object, ...], tuple[int, int]] = {}


@torch.inference_mode()
def _large(linear: nn.Module, kind: tuple[Any, ...]) -> tuple[int, int]:
    """A matrix that there should not be two of is tried itself: its many outputs make up for its numbers."""
    if kind not in _LARGE:
        x = torch.randn(ALIKE, kind[2], generator=torch.Generator().manual_seed(0)).to(kind[1])
        _LARGE[kind] = _found(linear.forward, x, BLOCK)
    return _LARGE[kind]


@torch.inference_mode()
def _trial(
    make: Callable[[torch.Tensor], _Multiply], takes: torch.dtype, width: int, rows: int, fixed: int
) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(width // 2 * 2, generator=generator)
    weight, x = torch.zeros(rows, width), torch.zeros(ALIKE, width)
    for whole, sign in ((weight, -1), (x, 1)):
        half = torch.randn(len(whole), width // 2, generator=generator)
        whole[:, order] = torch.cat([half, sign * half], dim=1)
    return _found(make(weight), x.to(takes), fixed)


def _found(multiply: _Multiply, x: torch.Tensor, fixed: int) -> tuple[int, int]:
    if _at_any_place(multiply, x):
        expected = multiply(x)
        uneven = (
            count
            for count in range(ALIKE - 1, 0, -1)
            if not torch.equal(multiply(x[:count]), expected[:count])
        )
        if (least := next(uneven, 0) + 1) <= ALIKE // 2:
            return least, ALIKE
    return (fixed, fixed) if _at_any_place(multiply, x[:fixed]) else (1, 1)


def _at_any_place(multiply: _Multiply, x: torch.Tensor) -> bool:
    return torch.equal(multiply(x.roll(1, 0)).roll(-1, 0), multiply(x))
