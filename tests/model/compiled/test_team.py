"""Compiled functions run on PyTorch's threads, or on the one there is."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="Numba is not installed")

import numba

from aparte.model.compiled import team as module
from aparte.model.compiled.team import Team, call, team


@numba.cfunc(numba.types.void(numba.types.CPointer(numba.types.int64)))
def visit(address: Any) -> None:
    """Adds, at each thread's number, how many there are."""
    given = numba.carray(address, 10)
    if given[0]:
        given[2 + call(given[0])] += call(given[1])
    else:
        given[2] += 1


def visited(by: Team, threads: int) -> list[int]:
    given = np.zeros(10, np.int64)
    given[:2] = by.number, by.size
    by.run(visit.address, given.ctypes.data, threads)
    return [int(count) for count in given[2:]]


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP library is found on Linux")
def test_every_thread_comes_once() -> None:
    own = team()
    assert own.number
    assert own.size
    assert visited(own, 2) == [2, 2, 0, 0, 0, 0, 0, 0]


def test_without_a_library_one_thread_does_it() -> None:
    assert visited(Team(None), 3) == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("maps", [[], ["a/libgomp.so.1", "b/libgomp.so.1"]])
def test_a_library_that_cannot_be_told_is_none(
    maps: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"7f00-7f01 r-xp 00000000 00:00 0 /somewhere/{path}" for path in maps]
    listing = tmp_path / "maps"
    listing.write_text("\n".join(lines))
    monkeypatch.setattr(module, "MAPS", listing)
    assert module._library() is None


def test_no_listing_is_none(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAPS", tmp_path / "none")
    assert module._library() is None
