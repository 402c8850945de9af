"""Which session an answer gets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from aparte.errors import AparteError, LinkError, UserError
from aparte.pool import BusyError, Pool, shared_prefix


class Held:
    """A seat as the pool sees it."""

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()
        self.closed = False

    def close(self) -> None:
        self.closed = True


def pool_of(size: int, most_waiting: int = 64) -> Any:
    return Pool(Held, size, most_waiting)  # type: ignore[arg-type, return-value]


def test_the_session_with_the_longest_common_beginning() -> None:
    pool = pool_of(3)
    seats = [pool.acquire([number]).result(5) for number in range(3)]
    for seat, tokens in zip(seats, ([1, 2, 3, 4], [1, 2, 9, 9], [5, 6]), strict=True):
        seat.tokens = tokens
        pool.release(seat)
    assert pool.acquire([1, 2, 9, 9, 9]).result(0) is seats[1]
    assert pool.acquire([1, 2, 9, 9, 9]).result(0) is seats[0]
    assert pool.busy == 2


def test_a_conversation_is_not_thrown_away_while_there_is_room() -> None:
    pool = pool_of(2)
    first = pool.acquire([1]).result(5)
    first.tokens = [1, 2, 3, 4, 5, 6]
    pool.release(first)
    second = pool.acquire([1, 2, 9]).result(5)
    assert second is not first
    assert pool.acquire([7]).result(5) is first, "there is no room for a third"


def test_who_waits_the_longest_is_next() -> None:
    pool = pool_of(1, most_waiting=2)
    seat = pool.acquire([1]).result(5)
    first, second = pool.acquire([2]), pool.acquire([3])
    with pytest.raises(BusyError):
        pool.acquire([4])
    assert pool.waiting == 2
    assert first.cancel()
    pool.release(seat)
    assert second.result(0) is seat
    assert pool.waiting == 0


def test_a_session_that_does_not_open_is_the_error_of_all_who_wait_for_it() -> None:
    go = threading.Event()

    def fail() -> Any:
        go.wait(5)
        raise LinkError("away")

    pool = Pool(fail, 1)
    first, second = pool.acquire([1]), pool.acquire([2])
    go.set()
    for one in (first, second):
        with pytest.raises(LinkError):
            one.result(5)
    assert pool.busy == 0


def test_closing() -> None:
    pool = pool_of(2)
    idle, busy = pool.acquire([1]).result(5), pool.acquire([2]).result(5)
    pool.release(idle)
    pool.close()
    assert idle.closed
    assert not busy.closed
    pool.release(busy)
    assert busy.closed
    with pytest.raises(AparteError, match="closed"):
        pool.acquire([1])
    with pytest.raises(UserError):
        pool_of(0)


def test_shared_prefix() -> None:
    assert shared_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert shared_prefix([], [1]) == 0
    assert shared_prefix([1, 2], [1, 2]) == 2
