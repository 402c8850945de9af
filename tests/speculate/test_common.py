"""The *common* source and its table."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aparte.speculate.common import KEPT, Common, CommonTable, make_table, pair_key, shipped_table

Places = list[tuple[int, int, list[tuple[int, float]]]]


def table_of(places: Places, most_pairs: int = 100, least: int = 1) -> CommonTable:
    width = len(places[0][2])
    return make_table(
        np.array([last for _, last, _ in places]),
        np.array([pair_key(before, last) for before, last, _ in places]),
        np.array([[token for token, _ in row] for *_, row in places]).reshape(-1, width),
        np.array([[share for _, share in row] for *_, row in places]).reshape(-1, width),
        most_pairs,
        least,
    )


tokens = st.integers(0, 6)
rows = st.permutations(range(6)).map(lambda order: list(zip(order[:3], (0.5, 0.25, 0.125), strict=True)))


@given(st.lists(st.tuples(tokens, tokens, rows), min_size=1, max_size=30))
def test_holds_mean_shares_best_first(places: Places) -> None:
    table = table_of(places)
    for place in {(before, last) for before, last, _ in places}:
        total: dict[int, float] = defaultdict(float)
        count = 0
        for before, last, row in places:
            if (before, last) == place:
                count += 1
                for token, share in row:
                    total[token] += share / 1
        found = table.after_two(place)
        expected = sorted((share / count for share in total.values()), reverse=True)[:KEPT]
        shares = [share for _, share in found if share > 0]
        assert shares == pytest.approx(expected, abs=1e-3)
        for token, share in found[: len(shares)]:
            assert share == pytest.approx(total[token] / count, abs=1e-3)


def test_knows_what_it_saw_and_nothing_else() -> None:
    table = table_of([(1, 2, [(7, 0.9)]), (1, 2, [(8, 0.7)]), (3, 2, [(7, 0.1)])])
    assert [token for token, share in table.after_one(2) if share] == [7, 8]
    assert [token for token, share in table.after_two((3, 2)) if share] == [7]
    assert table.after_one(9) == []
    assert table.after_two((2, 1)) == []


def test_rare_pairs_are_left_out_and_the_most_frequent_kept() -> None:
    places: Places = [(1, 2, [(7, 0.5)])] * 3 + [(4, 5, [(7, 0.5)])] * 2 + [(5, 6, [(7, 0.5)])]
    assert table_of(places, least=2).after_two((5, 6)) == []
    table = table_of(places, most_pairs=1)
    assert table.after_two((1, 2))
    assert not table.after_two((4, 5))


def test_two_tokens_come_before_one_and_each_token_once(tmp_path: Path) -> None:
    table = table_of([(1, 2, [(7, 0.9), (8, 0.05)]), (3, 2, [(8, 0.8), (9, 0.1)])])
    table.save(tmp_path / "table.safetensors")
    source = Common(CommonTable.load(tmp_path / "table.safetensors"))
    place = source.start([0, 1, 2])
    found = source.candidates(place)
    assert [candidate.token for candidate in found] == [7, 8, 9]
    assert found[0].kind == ("common-two", 0, 3)
    assert found[2].kind[0] == "common-one"
    assert source.candidates(source.advance(place, 5)) == []
    assert source.start([4]) == (0, 4)


def test_the_shipped_table_is_small_and_of_its_vocabulary() -> None:
    table = shipped_table("smollm2-135m")
    assert table is not None
    assert shipped_table("another") is None
    assert len(table.one_keys) > 1000
    assert len(table.two_keys) > 1000
    for tokens in (table.one_keys, table.one_tokens, table.two_tokens, table.two_keys >> 32):
        assert tokens.min() >= 0
        assert tokens.max() < 49_152
    for shares in (table.one_shares, table.two_shares):
        assert (np.diff(shares.astype(np.float32), axis=1) <= 0).all()
        assert ((shares >= 0) & (shares <= 1)).all()
