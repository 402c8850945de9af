"""Compiled rows are what PyTorch computes, and the same to the bit whatever rows are beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aparte.config import KvName
from aparte.model.kv import make_rows

kernels = pytest.importorskip("aparte.model.compiled.kernels", reason="Numba is not installed")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def one_by_one(function: Any, rows: torch.Tensor, *more: Any, out: tuple[torch.Tensor, ...]) -> None:
    """``function`` over all ``rows``, to ``out``; and over each alone, which has to be the same."""
    function(rows.numpy(), *more, *(each.numpy() for each in out))
    for row in range(len(rows)):
        alone = tuple(torch.empty_like(each[:1]) for each in out)
        function(rows[row : row + 1].contiguous().numpy(), *more, *(each.numpy() for each in alone))
        for single, each in zip(alone, out, strict=True):
            assert torch.equal(single[0], each[row])


def test_a_power_of_two_is_right_to_the_last_bits() -> None:
    exponents = np.linspace(-126, 126, 10_001, dtype=np.float32)
    got = np.array([kernels.power_of_two(exponent) for exponent in exponents])
    assert np.abs(got / np.exp2(exponents.astype(np.float64)) - 1).max() < 3e-7
    assert kernels.power_of_two(np.float32(-1e30)) < 2e-38


def test_the_greatest_and_the_largest() -> None:
    rows = [[-3.0, -0.5, -7.0], [0.0, -0.0, -1.0], [2.0, 9.0, -11.0], [1e-38, -1e-38, 0.0]]
    for row in rows:
        array = np.array(row, np.float32)
        assert kernels.greatest(array) == array.max()
        assert kernels.largest(array) == max(np.abs(array).max(), np.float32(1e-30))


@pytest.mark.parametrize("width", [8, 96, 577])
def test_a_norm(width: int) -> None:
    rows, weight = randn(5, width) * torch.logspace(-4, 4, 5)[:, None], randn(width)
    norm = nn.RMSNorm(width, eps=1e-5)
    norm.weight.data = weight
    root = width**0.5
    out, factors = torch.empty_like(rows), torch.empty(5)
    settings = ((weight * root).numpy(), np.float32(root * 1e-5**0.5), 0)
    one_by_one(kernels.normed, rows, *settings, out=(out, factors))
    torch.testing.assert_close(out, norm(rows), rtol=1e-5, atol=1e-6)
    assert torch.equal(factors, torch.ones(5))


@pytest.mark.parametrize("kind", [torch.int8, torch.float32])
@pytest.mark.parametrize("levels", [63, 127])
def test_scaled_rows_are_integers_that_their_factors_turn_back(kind: torch.dtype, levels: int) -> None:
    rows = randn(6, 200) * torch.logspace(-6, 6, 6)[:, None]
    rows[2] = 0
    out, factors = torch.empty(6, 200, dtype=kind), torch.empty(6)
    one_by_one(kernels.scaled, rows, levels, out=(out, factors))
    whole = out.double()
    assert torch.equal(whole, whole.round())
    assert torch.equal(whole.abs().amax(1), torch.tensor([levels] * 2 + [0] + [levels] * 3).double())
    step = rows.abs().amax(1, keepdim=True) / levels
    assert ((whole * factors[:, None] - rows).abs() <= 0.501 * step + 1e-12).all()


def test_rows_that_no_integers_are_made_of_stay() -> None:
    rows = randn(3, 40)
    out, factors = torch.empty_like(rows), torch.empty(3)
    kernels.scaled(rows.numpy(), 0, out.numpy(), factors.numpy())
    assert torch.equal(out, rows)
    assert torch.equal(factors, torch.ones(3))


def test_sums() -> None:
    rows, products, factors = randn(4, 30), randn(4, 31)[:, :30].contiguous(), randn(4)
    sums = torch.empty_like(rows)
    kernels.added(rows.numpy(), products.numpy(), factors.numpy(), sums.numpy())
    torch.testing.assert_close(sums, rows + products * factors[:, None])


def test_a_gate() -> None:
    products, factors = randn(5, 2 * 72) * 30, torch.rand(5) + 0.5
    products[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -90.0])
    out, out_factors = torch.empty(5, 72), torch.empty(5)
    kernels.gated(products.numpy(), factors.numpy(), 0, out.numpy(), out_factors.numpy())
    gate, up = (products * factors[:, None]).chunk(2, dim=1)
    torch.testing.assert_close(out, nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)
    alone = torch.empty(1, 72)
    kernels.gated(products[3:4].numpy(), factors[3:4].numpy(), 0, alone.numpy(), out_factors[:1].numpy())
    assert torch.equal(alone[0], out[3])


def test_heads_are_rotated_and_sorted() -> None:
    count, shared, size, nodes = 6, 2, 16, 3
    products, factors = randn(nodes, (count + 2 * shared) * size), torch.rand(nodes)
    bias, angles = randn((count + 2 * shared) * size), randn(nodes, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    queries, keys = torch.empty(nodes, count, size), torch.empty(shared, nodes, size)
    values = torch.empty_like(keys)
    given = (products, factors, bias, cos, sin, queries, keys, values)
    kernels.heads(*(each.numpy() for each in given))

    heads = (products * factors[:, None] + bias).view(nodes, -1, size)
    low, high = heads.chunk(2, dim=-1)
    turned = heads * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    torch.testing.assert_close(queries, turned[:, :count])
    torch.testing.assert_close(keys, turned[:, count : count + shared].transpose(0, 1))
    torch.testing.assert_close(values, heads[:, count + shared :].transpose(0, 1))


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_rows_are_stored_as_the_cache_stores_them(kind: KvName) -> None:
    keys, values = randn(1, 2, 3, 8), randn(1, 2, 3, 8) * torch.logspace(-6, 6, 3)[:, None]
    keys[0, 1, 2] = 0
    ours, theirs = ([make_rows(kind) for _ in range(2)] for _ in range(2))
    for rows in (*ours, *theirs):
        rows.grow(keys, 9, 0)
    raw = [rows.raw for rows in ours]
    assert raw[0] is not None
    assert raw[1] is not None
    new = keys.numpy()[0], values.numpy()[0]
    if raw[0].scaled:
        kernels.store_scaled(*new, raw[0].rows, raw[1].rows, raw[0].scales, raw[1].scales, 4)
    else:
        kernels.store(*new, raw[0].rows, raw[1].rows, 4)
    for our, their, rows in zip(ours, theirs, (keys, values), strict=True):
        assert torch.equal(our.read(7, torch.float32)[:, :, 4:], their.store(rows, 4)[:, :, 4:])
