from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aparte.distribution import Distribution
from aparte.speculate.tree import BELOW_ROOT, DraftTree, TreeBuilder, sanitize


def test_branches_share_their_prefix() -> None:
    builder = TreeBuilder()
    assert builder.add_chain([1, 2, 3], 0.5, room=10) == 3
    assert builder.add_chain([1, 2, 4], 0.9, room=10) == 1
    tree = builder.build()
    assert tree.tokens == (1, 2, 3, 4)
    assert tree.parents == (BELOW_ROOT, 0, 1, 1)
    assert tree.depths() == [1, 2, 3, 3]
    assert tree.probabilities[0] == 0.9  # the better estimate counts


def test_room_bounds_new_nodes_only() -> None:
    builder = TreeBuilder()
    builder.add_chain([1, 2], 0.5, room=2)
    assert builder.add_chain([1, 2, 3, 4], 0.5, room=1) == 1
    assert builder.build().tokens == (1, 2, 3)


ANYTHING = st.one_of(st.integers(-5, 300), st.none(), st.floats(), st.booleans())


@given(
    st.lists(ANYTHING, max_size=30),
    st.lists(st.integers(-3, 40), max_size=30),
    st.lists(st.one_of(st.floats(), st.none()), max_size=30),
    st.integers(0, 10),
    st.integers(0, 5),
)
def test_whatever_comes_in_a_proper_tree_comes_out(
    tokens: list[object], parents: list[int], probabilities: list[float], nodes: int, depth: int
) -> None:
    raw = DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))  # type: ignore[arg-type]
    tree = sanitize(raw, vocab_size=256, max_nodes=nodes, max_depth=depth)
    assert len(tree) <= nodes
    assert all(type(token) is int and 0 <= token < 256 for token in tree.tokens)
    assert all(BELOW_ROOT <= parent < node for node, parent in enumerate(tree.parents))
    assert all(0 <= probability <= 1 for probability in tree.probabilities)
    assert all(node_depth <= depth for node_depth in tree.depths())
    assert len(tree.children()) == len(tree)  # no twins


def test_a_proper_tree_is_left_alone() -> None:
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 2), (0.9, 0.5, 0.25, 0.1))
    assert sanitize(tree, vocab_size=10, max_nodes=4, max_depth=3) == tree


def test_what_hangs_below_a_dropped_node_is_dropped() -> None:
    tree = DraftTree((5, 99, 7, 8), (-1, 0, 1, 0), (0.9,) * 4)
    assert sanitize(tree, vocab_size=10, max_nodes=4, max_depth=3).tokens == (5, 8)


A, B, C = (Distribution((token, token + 1), (0.5, 0.5)) for token in (5, 6, 7))


def test_distributions_stay_with_their_nodes() -> None:
    tree = DraftTree((5, 99, 7), (-1, -1, 0), (0.9, 0.5, 0.4), (A, B, C))
    assert tree.head(2).drawn == (A, B)
    clean = sanitize(tree, vocab_size=10, max_nodes=3, max_depth=3)
    assert clean.tokens == (5, 7)
    assert clean.drawn == (A, C)
    assert sanitize(tree, vocab_size=100, max_nodes=3, max_depth=1).drawn == (A, B)
    twins = DraftTree((5, 5, 7), (-1, -1, 1), (0.9, 0.5, 0.4), (A, B, C))
    assert sanitize(twins, vocab_size=10, max_nodes=3, max_depth=3).drawn == (A, C)


def test_too_few_distributions_belong_to_nobody_knows_which_nodes() -> None:
    tree = DraftTree((5, 6), (-1, 0), (0.9, 0.5), (A,))
    assert len(sanitize(tree, vocab_size=10, max_nodes=3, max_depth=3)) == 0
