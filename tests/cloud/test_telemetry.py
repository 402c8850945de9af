"""Counts: as Prometheus reads them, as a status, and what a step pays for them."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from aparte.cloud.journal import Visit
from aparte.cloud.telemetry import Level, Telemetry
from aparte.wire.frames import ERROR_CODES

LEVEL = Level(2, 1, 64, 3, 1_000_000, 200_000, 1_500_000, 2_000_000, 5)
ABOUT = {"version": "0", "model": "tiny", "cut": "2,2", "dtype": "float32"}


def rendered(telemetry: Telemetry) -> dict[str, float]:
    """Values by name and labels."""
    lines = telemetry.render().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def test_what_is_there_and_what_was() -> None:
    telemetry = Telemetry(ABOUT, lambda: LEVEL)
    telemetry.answered(Visit(1, None), queue_ms=3.0, bytes_down=100)
    telemetry.passed(sessions=4, nodes=20, pass_ms=30.0)
    telemetry.failed(1, "frame")
    telemetry.counters.decide(3)
    telemetry.counters.decide(1)
    values = rendered(telemetry)
    assert values['aparte_cloud_info{cut="2,2",dtype="float32",model="tiny",version="0"}'] == 1
    assert values['aparte_cloud_sessions{state="connected"}'] == 2
    assert values['aparte_cloud_sessions{state="parked"}'] == 1
    assert values["aparte_cloud_kv_bytes"] == 1e6
    assert values["aparte_cloud_kv_idle_bytes"] == 2e5
    assert values["aparte_cloud_kv_peak_bytes"] == 1.5e6
    assert values["aparte_cloud_kv_budget_bytes"] == 2e6
    assert values["aparte_cloud_steps_total"] == 1
    assert values["aparte_cloud_sent_bytes_total"] == 100
    assert values['aparte_cloud_queue_seconds_bucket{le="0.002"}'] == 0
    assert values['aparte_cloud_queue_seconds_bucket{le="0.005"}'] == 1
    assert values["aparte_cloud_pass_seconds_sum"] == 0.03
    assert values['aparte_cloud_pass_sessions_bucket{le="4.0"}'] == 1
    assert values["aparte_cloud_pass_nodes_sum"] == 20
    assert values['aparte_cloud_errors_total{code="frame"}'] == 1
    assert values['aparte_cloud_errors_total{code="slot"}'] == 0
    accepted = [values[f'aparte_cloud_accepted_total{{position="{n}"}}'] for n in range(1, 5)]
    assert accepted == [2, 1, 1, 0]
    assert values["aparte_cloud_decided_steps_total"] == 2


def test_every_error_code_is_there_from_the_start() -> None:
    values = rendered(Telemetry(ABOUT, lambda: LEVEL))
    found = {match[1] for name in values if (match := re.search(r'errors_total{code="(\w+)"}', name))}
    assert found == set(ERROR_CODES)


def test_a_budget_without_limit_is_no_number() -> None:
    telemetry = Telemetry(ABOUT, lambda: replace(LEVEL, kv_budget_bytes=None))
    assert "aparte_cloud_kv_budget_bytes" not in rendered(telemetry)
    assert telemetry.status()["memory"] == {
        "kv_bytes": 1_000_000,
        "kv_idle_bytes": 200_000,
        "kv_peak_bytes": 1_500_000,
        "kv_budget_bytes": None,
    }


def test_the_status_tells_the_last_error_and_how_long_ago() -> None:
    now = [100.0]
    telemetry = Telemetry(ABOUT, lambda: LEVEL, clock=lambda: now[0])
    assert telemetry.status()["last_error"] is None
    telemetry.refused("slot")
    now[0] += 30
    status = telemetry.status()
    assert status["last_error"] == {"code": "slot", "seconds_ago": 30.0}
    assert status["errors"] == {"slot": 1}
    assert status["uptime_s"] == 30
    assert status["model"] == "tiny"


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = Telemetry(ABOUT, lambda: LEVEL), Telemetry(ABOUT, lambda: LEVEL)
    one.passed(1, 1, 1.0)
    assert rendered(other)["aparte_cloud_pass_nodes_count"] == 0


def test_counting_costs_microseconds() -> None:
    """Far below a forward pass of any model; generous, because machines are busy."""
    telemetry = Telemetry(ABOUT, lambda: LEVEL)
    best = min(_cost(telemetry) for _ in range(5))
    assert best < 200e-6


def _cost(telemetry: Telemetry) -> float:
    visit, started = Visit(1, None), time.perf_counter()
    for _ in range(200):
        telemetry.answered(visit, 1.0, 1000)
        telemetry.passed(2, 8, 20.0)
        telemetry.counters.decide(3)
    return (time.perf_counter() - started) / 200
