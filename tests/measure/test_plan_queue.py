"""The simulation of many users at a cloud, against cases that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte.errors import UserError
from aparte.measure.plan_queue import SLOWEST, Crowd, Curve, enough, simulate

FREE = Curve.straight(20.0, 0.0, "more nodes cost nothing")
DEAR = Curve.straight(20.0, 20.0, "nothing is saved by sharing")


def test_one_user_waits_for_nobody() -> None:
    outcome = simulate(Crowd(1, 80.0, 1, 1), FREE)
    assert outcome.queue_p95_ms == 0
    assert outcome.step_p50_ms == pytest.approx(100, rel=0.03)
    assert outcome.tok_s == pytest.approx(10, rel=0.02)
    assert outcome.busy == pytest.approx(0.2, rel=0.02)


def test_passes_that_cost_the_same_for_everybody_are_shared_by_everybody() -> None:
    crowd = Crowd(100, 80.0, 1, 1)
    outcome = simulate(crowd, FREE)
    assert outcome.busy == pytest.approx(1.0, rel=0.01)
    assert outcome.queue_p95_ms <= 20  # at most until the pass that runs is over
    assert outcome.tok_s > 100 * 1e3 / (80 * 1.05 + 40)  # what everybody has who waits for one pass each time


def test_passes_that_save_nothing_bound_all_users_together() -> None:
    outcome = simulate(Crowd(50, 80.0, 1, 1), DEAR)
    assert outcome.tok_s == pytest.approx(50, rel=0.02)  # one node in 20 ms
    assert outcome.busy == pytest.approx(1.0, rel=0.01)


def test_speculative_tokens_count() -> None:
    assert simulate(Crowd(1, 80.0, 8, 3), FREE).tok_s == pytest.approx(30, rel=0.02)


def test_replicas_share_the_users() -> None:
    crowd = Crowd(9, 80.0, 1, 1)
    alone, three = simulate(crowd, DEAR, 1), simulate(crowd, DEAR, 3)
    assert three.tok_s > 1.5 * alone.tok_s
    assert three.step_p95_ms < alone.step_p95_ms
    assert simulate(crowd, DEAR, 9).queue_p95_ms == 0
    assert simulate(crowd, DEAR, 3) == three  # chance is seeded


def test_replicas_are_added_until_it_is_quick_enough() -> None:
    crowd = Crowd(20, 80.0, 1, 1)
    outcomes = enough(crowd, DEAR)
    assert [outcome.replicas for outcome in outcomes] == list(range(1, len(outcomes) + 1))
    limits = [outcome.step_p95_ms <= SLOWEST * 100 for outcome in outcomes]
    assert limits == [False] * (len(outcomes) - 1) + [True]
    assert len(enough(crowd, FREE)) == 1


def test_a_curve_goes_through_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    rows = [
        {"nodes": nodes, "middle_ms": ms, "device_ms": 3} for nodes, ms in ((8, 30.0), (1, 20.0), (16, 50.0))
    ]
    file.write_text(json.dumps({"rows": rows}))
    curve = Curve.read(file)
    assert [curve(nodes) for nodes in (0, 1, 8, 12, 16, 24)] == [20, 20, 30, 40, 50, 70]
    assert "step.json" in curve.source
    # fixed 18 ms and 2 ms for each: a pass of ten times the fixed time has some 80 nodes
    assert curve.full == 81


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [{"nodes": 1}]}', '{"rows": []}', "\0"]
)
def test_files_that_hold_no_measurement(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(UserError, match=r"bench step|no curve"):
        Curve.read(tmp_path / "x")
    with pytest.raises(UserError, match="bench step"):
        Curve.read(tmp_path / "missing")


def test_times_that_cannot_be() -> None:
    for points in ((), ((1.0, -1.0),), ((1.0, 2.0), (1.0, 3.0)), ((1.0, float("inf")),)):
        with pytest.raises(UserError, match="no curve"):
            Curve(points, "a file")
