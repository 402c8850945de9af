"""When drafting pays: the arithmetic, with a clock that is told what time it is."""

from __future__ import annotations

import pytest

from aparte.speculate.pace import FIRST_GAIN, FIRST_HIT_RATE, REST, TRIAL, FadingMean, Pace, Patience


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, ms: float) -> None:
        self.now += ms / 1e3


def paced(
    step_ms: float,
    tokens: int,
    level_ms: float,
    draft_ms: float,
    foreseen: int,
    hits: bool = True,
    gained: int | None = None,
) -> Pace:
    """After a long time of equal steps."""
    clock = Clock()
    pace, length = Pace(clock), 10
    for _ in range(TRIAL):
        pace.is_worth_drafting()
    for _ in range(100):
        with pace.drafting(length):
            clock.wait(draft_ms)
        with pace.level():
            clock.wait(level_ms)
        clock.wait(step_ms - draft_ms - level_ms)
        pace.step(length, tokens)
        pace.foreseen(foreseen, foreseen if gained is None else gained)
        pace.best_guess(hits)
        length += tokens
    return pace


def test_a_fading_mean_follows_what_changed_and_not_a_stall() -> None:
    mean = FadingMean()
    assert mean.mean is None
    for _ in range(50):
        mean.add_time(10)
    mean.add_time(10_000)
    assert mean.mean == pytest.approx(12, abs=0.1)  # counted as 30
    for _ in range(50):
        mean.add_time(20)
    assert mean.mean == pytest.approx(20, abs=0.1)


def test_the_pace_is_tokens_over_time() -> None:
    assert paced(step_ms=100, tokens=3, level_ms=10, draft_ms=20, foreseen=2).tokens_per_ms == pytest.approx(
        0.03
    )


@pytest.mark.parametrize("chance", [0.1, 0.2, 0.4, 0.9])
def test_a_level_pays_if_it_brings_more_than_the_same_time_otherwise(chance: float) -> None:
    pace = paced(step_ms=100, tokens=3, level_ms=10, draft_ms=20, foreseen=2)
    assert pace.is_worth_a_level(chance) == (chance * (4 * FIRST_HIT_RATE + 10) / 14 > 0.3)


def test_a_level_that_others_would_have_brought_too_counts_for_less() -> None:
    shared = paced(100, 4, 5, 20, foreseen=4, gained=1)
    assert shared.is_worth_a_level(0.9)
    assert not shared.is_worth_a_level(0.5)
    assert paced(100, 4, 5, 20, foreseen=4, gained=4).is_worth_a_level(0.5)


def test_drafting_that_brings_what_others_bring_too_does_not_pay() -> None:
    assert not paced(100, 4, 5, 20, foreseen=3, gained=0).is_worth_drafting()
    assert paced(100, 4, 5, 20, foreseen=3, gained=3).is_worth_drafting()


def test_a_level_below_guesses_that_are_never_right_does_not_pay() -> None:
    assert not paced(100, 3, 10, 20, 2, hits=False).is_worth_a_level(1.0)


def test_before_anything_is_known_a_level_has_to_promise_something() -> None:
    pace = Pace(Clock())
    assert pace.tokens_per_ms is None
    assert pace.is_worth_a_level(1.1 * FIRST_GAIN / FIRST_HIT_RATE)
    assert not pace.is_worth_a_level(0.9 * FIRST_GAIN / FIRST_HIT_RATE)


@pytest.mark.parametrize(("draft_ms", "pays"), [(10, True), (60, True), (70, False), (90, False)])
def test_drafting_pays_if_it_brings_more_than_the_same_time_otherwise(draft_ms: float, pays: bool) -> None:
    """3 tokens in 100 ms, 2 of them foreseen: worth up to 67 ms."""
    assert paced(100, 3, 1, draft_ms, 2).is_worth_drafting() is pays


def test_a_rest_ends_with_a_trial() -> None:
    pace = paced(100, 3, 1, 90, 1)
    asked = [pace.is_worth_drafting() for _ in range(1 + REST + TRIAL + 1)]
    assert asked == [False] * (1 + REST) + [True] * TRIAL + [False]


def test_catching_up_is_not_the_price_of_drafting() -> None:
    """Neither the first prompt, nor another conversation, nor what a rest left unread."""
    clock = Clock()
    pace = Pace(clock)
    for length, ms in ((500, 5000), (505, 10), (510, 10), (20, 1000), (25, 10)):
        with pace.drafting(length):
            clock.wait(ms)
    assert pace._draft_ms.mean == pytest.approx(10)


def test_patience_asks_as_long_as_there_is_something_to_gain() -> None:
    clock = Clock()
    pace = Patience(clock)
    for length in range(10, 60):
        assert pace.is_worth_drafting()
        with pace.drafting(length), pace.level():
            clock.wait(1000)
        pace.step(length, 1)
        pace.foreseen(0, 0)
    assert pace.is_worth_a_level(0.2)
    assert not pace.is_worth_a_level(0.01)
