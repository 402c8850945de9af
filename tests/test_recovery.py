"""When to try again, how long to wait before, and when to give up; the link itself is in test_resume."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from aparte.config import LinkSettings
from aparte.deadline import Deadline
from aparte.errors import DoorError, GivenUpError, LinkError, SilenceError
from aparte.recovery import CacheLostError, Recovery
from aparte.step import Step
from aparte.target.base import Ask, Evaluation

SETTINGS = LinkSettings(retries=6, first_wait_s=1, longest_wait_s=10)


class Flaky:
    """A target that does what it is told: what ``open`` and ``collect`` raise or return, one by one."""

    name = "split"
    max_context = vocab_size = max_nodes = 100
    rotary_switch = None
    bytes_up = bytes_down = 0

    def __init__(self, opens: Sequence[bool | Exception] = (), collects: Sequence[Exception] = ()) -> None:
        self._opens = list(opens)
        self._collects = list(collects)
        self.opened = 0

    def open(self) -> bool:
        self.opened += 1
        result = self._opens.pop(0) if self._opens else True
        if isinstance(result, Exception):
            raise result
        return result

    def collect(self) -> Evaluation:
        if self._collects:
            raise self._collects.pop(0)
        return Evaluation(torch.zeros(1, 4))

    def submit(self, step: Step, tokens: Sequence[int], ask: Ask) -> None: ...
    def abandon(self) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def recovery(time: Time, settings: LinkSettings = SETTINGS, share: float = 1.0) -> Recovery:
    deadline = Deadline(settings.answer_timeout_s, time.clock)
    return Recovery(settings, deadline, sleep=time.sleep, share=lambda: share)


def away() -> LinkError:
    return LinkError("It went away.")


def test_waits_double_up_to_the_longest() -> None:
    time, target = Time(), Flaky([away()] * 5)
    assert recovery(time).open(target)
    assert time.waits == [1, 2, 4, 8, 10]
    assert target.opened == 6


@pytest.mark.parametrize(("share", "waits"), [(0.0, [0, 1, 2, 4]), (0.5, [0.5, 1.5, 3, 6])])
def test_waits_are_spread_out(share: float, waits: list[float]) -> None:
    time = Time()
    recovery(time, share=share).open(Flaky([away()] * 4))
    assert time.waits == waits


def test_devices_do_not_wait_alike() -> None:
    waits = set()
    for _ in range(20):
        time = Time()
        Recovery(SETTINGS, sleep=time.sleep).open(Flaky([away()] * 2))
        waits.add(tuple(time.waits))
    assert len(waits) == 20


def test_after_the_last_attempt_it_is_given_up() -> None:
    time, target = Time(), Flaky([away()] * 6 + [LinkError("Nobody is there.")])
    with pytest.raises(
        GivenUpError, match=r"went away\. .*6 times in vain.*Nobody is there.*is valid.*--cloud"
    ):
        recovery(time).open(target)
    assert len(time.waits) == 6


def test_without_settings_nothing_is_tried_again() -> None:
    target = Flaky([away()])
    with pytest.raises(LinkError, match=r"^It went away\.$"):
        Recovery().open(target)
    assert target.opened == 1


def test_what_is_found_again_is_collected() -> None:
    time = Time()
    subject = recovery(time)
    assert subject.collect(Flaky([True], [away(), away()])).logits.shape == (1, 4)
    assert subject.lost == 2


def test_what_is_found_again_without_its_cache_is_for_the_loop_to_fill() -> None:
    subject = recovery(Time())
    with pytest.raises(CacheLostError):
        subject.collect(Flaky([away(), False], [away()]))


def test_attempts_count_from_the_last_progress() -> None:
    time = Time()
    subject = recovery(time)
    for position in (1, 2, 3):
        subject.collect(Flaky([away()] * 5, [away()]))
        subject.reached(position)
    assert time.waits == [1, 2, 4, 8, 10, 10] * 3


def test_going_over_the_same_ground_again_is_no_progress() -> None:
    subject = recovery(Time())
    subject.reached(50)
    for _ in range(6):
        with pytest.raises(CacheLostError):
            subject.collect(Flaky([False], [away()]))
        subject.reached(49)
    with pytest.raises(GivenUpError):
        subject.collect(Flaky([False], [away()]))


def test_every_answer_has_all_attempts() -> None:
    subject = recovery(Time())
    for _ in range(3):
        with subject.answer():
            subject.open(Flaky([away()] * 6))


def test_an_answers_time_is_not_spent_on_waiting_in_vain() -> None:
    time = Time()
    subject = recovery(time, LinkSettings(answer_timeout_s=5, first_wait_s=1))
    with pytest.raises(GivenUpError, match="within 5 s"), subject.answer():
        subject.collect(Flaky([away()] * 9, [away()]))
    assert time.waits == [1, 2]  # the next wait would be of 4


def test_an_answers_time_is_over_also_if_nothing_is_wrong() -> None:
    time = Time()
    subject = recovery(time, LinkSettings(answer_timeout_s=5))
    with subject.answer():
        subject.collect(Flaky())
        time.now += 6
        with pytest.raises(GivenUpError, match="within 5 s"):
            subject.collect(Flaky())


def test_silence_is_not_asked_for_again() -> None:
    target = Flaky([], [SilenceError("The cloud", 9)])
    with pytest.raises(SilenceError):
        recovery(Time()).collect(target)
    assert target.opened == 0


def test_silence_is_no_end_if_there_is_another_cloud() -> None:
    error = SilenceError("The cloud", 9)
    error.elsewhere = True
    with pytest.raises(CacheLostError):
        recovery(Time()).collect(Flaky([False], [error]))


def test_what_is_no_matter_of_the_link_is_not_tried_again() -> None:
    """A token that was revoked meanwhile stays revoked."""
    target = Flaky([away(), DoorError("refused")], [away()])
    with pytest.raises(DoorError):
        recovery(Time()).collect(target)
    assert target.opened == 2


def test_a_cloud_that_is_full_is_left_alone_as_long_as_it_asks() -> None:
    full = away()
    full.retry_after_s = 5
    time = Time()
    recovery(time).open(Flaky([full, full]))
    assert time.waits == [5, 5]
