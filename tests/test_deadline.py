"""The time that an answer may take."""

from __future__ import annotations

import math

import pytest

from aparte.config import LinkSettings
from aparte.deadline import Deadline
from aparte.errors import GivenUpError, UserError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_runs_from_the_beginning_of_an_answer_to_its_end() -> None:
    clock = Clock()
    deadline = Deadline(5, clock)
    clock.now += 50
    assert deadline.left_s == math.inf
    deadline.start()
    clock.now += 4
    assert deadline.left_s == pytest.approx(1)
    deadline.check()
    clock.now += 1
    with pytest.raises(GivenUpError, match=r"within 5 s.*--answer-timeout.*is valid.*Raise the limit"):
        deadline.check()
    deadline.stop()
    deadline.check()
    deadline.start()  # the next answer has all of its time
    assert deadline.left_s == pytest.approx(5)


def test_without_a_limit_there_is_no_end() -> None:
    deadline = Deadline()
    deadline.start()
    assert deadline.left_s == math.inf
    deadline.check()


@pytest.mark.parametrize("name", ["connect_timeout_s", "step_timeout_s", "answer_timeout_s", "first_wait_s"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_times_are_positive(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        LinkSettings(**{name: value})


@pytest.mark.parametrize("retries", [-1, 1001])
def test_retries_are_a_number_of_attempts(retries: int) -> None:
    with pytest.raises(UserError, match="retries"):
        LinkSettings(retries=retries)
