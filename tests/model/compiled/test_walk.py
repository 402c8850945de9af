"""Walking a path is attention over the same rows, and nothing but the path decides its bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aparte.model.kv import Rows, make_rows
from aparte.model.paths import Paths
from aparte.model.tree import Layout, SlotTree
from aparte.step import ROOT, Step, chain_parents

walks = pytest.importorskip("aparte.model.compiled.walk", reason="Numba is not installed")

HEADS, SHARED = 6, 2
#: None, part of a block, blocks, pieces and parts of them.
PREFIXES = [0, 5, 64, 200, 256, 700]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layout(prefix: int, parents: list[int]) -> Layout:
    """``parents[i]`` is the node that node ``i`` hangs below, -1 for the prefix."""
    tree = SlotTree()
    if prefix:
        tree.apply(Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, prefix)))
    tip = prefix - 1 if prefix else ROOT
    slots = tuple(tip if parent < 0 else prefix + parent for parent in parents)
    return tree.apply(Step(1, 0, tip, prefix, slots))


def stored(count: int, kind: str, size: int, seed: int) -> tuple[Rows, torch.Tensor]:
    """Rows with room for more, and what they read as ``[1, SHARED, count, size]``."""
    new = torch.randn(1, SHARED, count, size, generator=torch.Generator().manual_seed(seed))
    rows = make_rows(kind)  # type: ignore[arg-type]
    rows.grow(new, count + 70, 0)
    return rows, rows.store(new, 0)


def attend(paths: Paths, queries: torch.Tensor, keys: Rows, values: Rows) -> torch.Tensor:
    queries = queries.contiguous()
    result = torch.full_like(queries, math.nan)
    walk = walks.walk_of(paths, queries.shape[1], SHARED, queries.shape[2], 0.2)
    assert keys.raw is not None
    assert values.raw is not None
    walk.attend(queries.data_ptr(), keys.raw, values.raw, result.numpy())
    return result


def expected(where: Layout, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(len(queries), where.total, dtype=torch.bool)
    seen[:, where.prefix :] = torch.from_numpy(where.ancestors)
    return torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys, values, attn_mask=seen, scale=0.2, enable_gqa=True
    )[0].transpose(0, 1)


@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("size", [16, 20, 64])
def test_it_is_attention_over_a_tree(prefix: int, size: int, kind: str) -> None:
    where = layout(prefix, [-1, 0, 0, 1, 2, -1])
    keys, read_keys = stored(where.total, kind, size, 1)
    values, read_values = stored(where.total, kind, size, 2)
    queries = torch.randn(6, HEADS, size)
    got = attend(Paths(where), queries, keys, values)
    torch.testing.assert_close(got, expected(where, queries, read_keys, read_values), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_node_alone_has_the_same_bits(prefix: int, kind: str) -> None:
    parents = [-1, 0, 0, 1, 2, -1]
    where = layout(prefix, parents)
    keys, _ = stored(where.total, kind, 64, 1)
    values, _ = stored(where.total, kind, 64, 2)
    queries = torch.randn(6, HEADS, 64)
    together = attend(Paths(where), queries, keys, values)
    for node, sees in enumerate(where.ancestors):
        path = prefix + np.flatnonzero(sees)
        # As it would lie in the cache had the path been written token by token.
        own_keys, own_values = make_rows(kind), make_rows(kind)  # type: ignore[arg-type]
        rows = np.array([*range(prefix), *path.tolist()])
        for own, of in ((own_keys, keys), (own_values, values)):
            plain = torch.randn(1, SHARED, len(rows), 64)
            own.grow(plain, len(rows), 0)
            assert own.raw is not None
            assert of.raw is not None
            own.raw.rows[:] = of.raw.rows[:, rows]
            if own.raw.scaled:
                own.raw.scales[:] = of.raw.scales[:, rows]
        alone = attend(Paths(layout(len(rows) - 1, [-1])), queries[node : node + 1], own_keys, own_values)
        assert torch.equal(alone[0], together[node])


@pytest.mark.parametrize("prefix", [256, 700, 3000])
def test_threads_do_not_change_a_bit(prefix: int, two_threads: None) -> None:
    where = layout(prefix, [-1, 0, 0])
    keys, _ = stored(where.total, "model", 64, 1)
    values, _ = stored(where.total, "model", 64, 2)
    queries = torch.randn(3, HEADS, 64)
    shared = attend(Paths(where), queries, keys, values)
    torch.set_num_threads(1)
    assert torch.equal(shared, attend(Paths(where), queries, keys, values))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
def test_heads_that_share_keys(group: int) -> None:
    """Three at a time, and what is left one by one."""
    where = layout(130, [-1, 0])
    keys, read_keys = stored(where.total, "int8", 32, 1)
    values, read_values = stored(where.total, "int8", 32, 2)
    queries = torch.randn(2, group * SHARED, 32)
    got = attend(Paths(where), queries, keys, values)
    torch.testing.assert_close(got, expected(where, queries, read_keys, read_values), rtol=1e-5, atol=2e-6)


def test_very_different_scores() -> None:
    """One row that outweighs all others, in the last piece, then in the first."""
    where = layout(600, [-1])
    for loud in (3, 599):
        keys, read_keys = stored(where.total, "model", 16, 1)
        values, read_values = stored(where.total, "model", 16, 2)
        read_keys[:, :, loud] *= 20
        queries = read_keys[0, :1, loud].expand(HEADS, 16)[None]
        got = attend(Paths(where), queries, keys, values)
        torch.testing.assert_close(
            got, expected(where, queries, read_keys, read_values), rtol=1e-4, atol=1e-5
        )


def test_layers_of_one_shape_share_a_walk() -> None:
    paths = Paths(layout(5, [-1]))
    first = walks.walk_of(paths, HEADS, SHARED, 64, 0.2)
    assert walks.walk_of(paths, HEADS, SHARED, 64, 0.2) is first
    assert walks.walk_of(paths, HEADS, SHARED, 32, 0.2) is not first
