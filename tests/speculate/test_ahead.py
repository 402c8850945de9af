"""Whether to send ahead: the rule, and what it does to the time of an answer in the worst case."""

from __future__ import annotations

import itertools
import random

import pytest

from aparte.speculate.ahead import SendAhead
from aparte.target.base import Timing


def measured(latency_ms: float, device_ms: float, cloud_ms: float, ms_per_node: float = 0.1) -> SendAhead:
    plan, sizes = SendAhead(), random.Random(0)
    for _ in range(60):
        nodes = sizes.randint(1, 20)
        wait_ms = latency_ms + ms_per_node * nodes + cloud_ms
        timing = Timing(device_ms=device_ms, wait_ms=wait_ms, cloud_ms=cloud_ms)
        plan.observe(nodes, draft_ms=0.0, timing=timing)
    return plan


def test_nothing_is_sent_before_a_step_was_seen() -> None:
    assert not SendAhead().pays(1.0, 8)


def test_a_long_link_pays_and_a_short_one_does_not() -> None:
    assert measured(80, 10, 25).pays(0.3, 8)
    assert not measured(0, 10, 25).pays(0.99, 8)
    assert not measured(5, 20, 50).pays(0.5, 8)


def test_an_unlikely_step_is_not_sent() -> None:
    assert not measured(80, 10, 25).pays(0.02, 8)
    assert not measured(80, 60, 150).pays(0.3, 8)


def test_a_slow_uplink_makes_nodes_dear() -> None:
    plan = measured(80, 10, 25, ms_per_node=8)
    assert plan.pays(0.4, 1)
    assert not plan.pays(0.4, 30)


def test_no_more_is_sent_than_both_sides_can_work_off() -> None:
    plan = measured(80, 10, 25)
    assert [plan.pays(0.9, 8, in_flight) for in_flight in (1, 2, 3, 4, 5)] == [True, True, True, False, False]


def test_predictions_are_corrected_by_what_came_true() -> None:
    plan = SendAhead()
    assert plan.likely(0.5) == pytest.approx(0.5)
    for number in range(60):
        plan.saw(0.8, number % 5 == 0)
    assert plan.likely(0.8) == pytest.approx(0.2, abs=0.15)
    for _ in range(60):
        plan.saw(0.5, True)
    assert plan.likely(0.9) == 1.0


def answer_ms(latency_ms: float, device_ms: float, cloud_ms: float, chance: float, ahead: bool) -> float:
    """Time of 400 round trips with one step sent ahead of each, or none, on one shared processor.

    Half of the device's work comes before sending and half after. Work is done in the order in which it
    can begin; each step sent ahead is right with ``chance``.
    """
    luck, half = random.Random(1), device_ms / 2
    processor = now = 0.0

    def work(ready: float, ms: float) -> float:
        nonlocal processor
        processor = max(processor, ready) + ms
        return processor

    trips, flying = 0, None  # when the result of a step sent ahead reaches the device
    while trips < 400:
        trips += 1
        if flying is None:
            sent = work(now, half)
            behind = work(sent, half) if ahead else sent
            computed = work(sent + latency_ms / 2, cloud_ms)
        else:
            behind, computed = work(now, half), flying - latency_ms / 2
        result = max(computed + latency_ms / 2, behind)
        if ahead:
            flying = work(max(behind + latency_ms / 2, computed), cloud_ms) + latency_ms / 2
        now = work(result, half)
        if not ahead or luck.random() >= chance:
            flying = None
    return now


@pytest.mark.parametrize("latency_ms", [1, 5, 20, 80, 150])
def test_an_answer_never_takes_three_percent_more(latency_ms: float) -> None:
    gains = []
    for device_ms, cloud_ms, chance in itertools.product(
        (5, 20, 60), (5, 25, 70, 200), (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
    ):
        if measured(latency_ms, device_ms, cloud_ms, ms_per_node=0.0).pays(chance, 8):
            without = answer_ms(latency_ms, device_ms, cloud_ms, chance, ahead=False)
            gains.append(without / answer_ms(latency_ms, device_ms, cloud_ms, chance, ahead=True))
    assert min(gains, default=1.0) > 0.97
    assert max(gains, default=1.0) > {1: 0.99, 5: 1.0, 20: 1.2, 80: 1.5, 150: 1.5}[latency_ms]
