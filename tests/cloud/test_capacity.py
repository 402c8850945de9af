"""How many replicas there should be."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from aparte.cloud.capacity import STEPS_IN_HAND, Replicas, needs, wanted_replicas
from aparte.errors import UserError


@pytest.mark.parametrize(
    ("text", "least", "most"), [("1", 1, 1), ("12", 12, 12), ("2-5", 2, 5), ("auto", 1, None)]
)
def test_numbers_of_replicas(text: str, least: int, most: int | None) -> None:
    assert Replicas.parse(text) == Replicas(least, most)


@pytest.mark.parametrize("text", ["0", "-1", "5-2", "0-3", "two", "", "1-", "99999", "1.5"])
def test_what_is_no_number_of_replicas(text: str) -> None:
    with pytest.raises(UserError, match="--replicas"):
        Replicas.parse(text)


def wanted(*replicas: tuple[float, float], most_sessions: int = 64) -> int:
    """Replicas for what those that are there say: steps in hand and sessions of each."""
    said = {str(number): needs(*each, most_sessions) for number, each in enumerate(replicas)}
    names = ("by_steps", "by_sessions")
    metrics = {name: {who: found[name] for who, found in said.items()} for name in names}
    number, state = wanted_replicas(SimpleNamespace(aggregated_metrics=metrics))
    assert state == {}
    return number


def test_the_queue_decides_and_so_do_sessions() -> None:
    assert wanted((0, 0)) == 1
    assert wanted((STEPS_IN_HAND, 1)) == 1
    assert wanted((STEPS_IN_HAND + 0.1, 1)) == 2
    assert wanted((10 * STEPS_IN_HAND, 1)) == 10
    assert wanted((0, 51)) == 1  # nearly all places of one replica
    assert wanted((0, 52)) == 2
    assert wanted((0, 3 * 64)) == 4
    assert wanted((0, 4), most_sessions=4) == 2, "places as the server has them"


def test_it_adds_up_what_the_replicas_say() -> None:
    assert wanted((5.0, 2.0), (4.0, 2.0)) == 3
    assert wanted((1.0, 30.0), (1.0, 30.0)) == 2
    assert wanted_replicas(SimpleNamespace(aggregated_metrics=None))[0] == 1  # nobody has said anything yet
    only = {"by_sessions": {"a": 1.5}}
    assert wanted_replicas(SimpleNamespace(aggregated_metrics=only))[0] == 2


def test_the_controller_of_a_cluster_needs_no_torch() -> None:
    code = "import sys, aparte.cloud.capacity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
