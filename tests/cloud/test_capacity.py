"""How many replicas there should be."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from aparte.cloud.capacity import STEPS_IN_HAND, Replicas, wanted, wanted_replicas
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


def test_the_queue_decides_and_so_do_sessions() -> None:
    assert wanted(0, 0, 64) == 1
    assert wanted(STEPS_IN_HAND, 1, 64) == 1
    assert wanted(STEPS_IN_HAND + 0.1, 1, 64) == 2
    assert wanted(10 * STEPS_IN_HAND, 1, 64) == 10
    assert wanted(0, 51, 64) == 1  # nearly all places of one replica
    assert wanted(0, 52, 64) == 2
    assert wanted(0, 3 * 64, 64) == 4


def test_it_adds_up_what_the_replicas_say() -> None:
    said = {"in_hand": {"a": 5.0, "b": 4.0}, "sessions": {"a": 2.0, "b": 2.0}}
    assert wanted_replicas(SimpleNamespace(aggregated_metrics=said))[0] == 3
    assert wanted_replicas(SimpleNamespace(aggregated_metrics=None))[0] == 1  # nobody has said anything yet
    assert wanted_replicas(SimpleNamespace(aggregated_metrics={"sessions": {"a": 3.0}}), 2)[0] == 2


def test_the_controller_of_a_cluster_needs_no_torch() -> None:
    code = "import sys, aparte.cloud.capacity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
