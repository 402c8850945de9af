"""What the server did since it started, counted: for Prometheus, for ``aparte status`` and for the log.

Numbers and codes only. Counts are plain integers that are read when somebody asks, and four histograms are
written to once per step or pass, which takes a few microseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aparte.cloud.acceptance import POSITIONS
from aparte.cloud.journal import Visit, write
from aparte.cloud.sessions import Session
from aparte.step import Step
from aparte.wire.frames import ERROR_CODES

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass
class Counters:
    """What the server did since it started."""

    sessions_opened: int = 0
    sessions_resumed: int = 0
    steps: int = 0
    stale_steps: int = 0
    nodes: int = 0
    committed: int = 0
    decided_steps: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    #: Of decided steps, how many had a node at that depth (1, 2, …) on the committed path.
    accepted: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    errors_by_code: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ERROR_CODES, 0))

    @property
    def errors(self) -> int:
        return sum(self.errors_by_code.values())

    def decide(self, kept: int) -> None:
        """``kept`` nodes of a step turned out right."""
        self.decided_steps += 1
        for position in range(min(kept, POSITIONS)):
            self.accepted[position] += 1


@dataclass(frozen=True)
class Level:
    """What there is at this moment."""

    connected: int
    parked: int
    most_sessions: int
    waiting_steps: int
    kv_bytes: int
    kv_idle_bytes: int
    kv_peak_bytes: int
    kv_budget_bytes: int | None
    evicted: int


class Telemetry:
    """Of one server; several may live in one process."""

    def __init__(
        self, about: dict[str, str], level: Callable[[], Level], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``about`` says what is served, ``level`` what is there when somebody asks."""
        self.about = about
        self.level = level
        self.counters = Counters()
        self._clock = clock
        self._started = clock()
        self._last_error: tuple[str, float] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(_Counted(self))
        ProcessCollector(registry=self._registry)
        self._queue = self._histogram(
            "queue_seconds", "Time of a step from arrival to answer, without passes."
        )
        self._pass = self._histogram("pass_seconds", "Time of a forward pass.")
        self._company = self._histogram("pass_sessions", "Sessions that shared a forward pass.", SIZES[:7])
        self._width = self._histogram("pass_nodes", "Nodes of a forward pass.", SIZES)

    def arrived(self, session: Session, visit: Visit, step: Step, size: int) -> None:
        """A step of ``session`` came that is within bounds; its message had ``size`` bytes."""
        counters = self.counters
        counters.nodes += len(step)
        counters.bytes_up += size
        visit.nodes += len(step)
        visit.bytes_up += size
        committed, decided = session.acceptance.arrived(step, unanswered=session.unanswered > 0)
        counters.committed += committed
        for kept in decided:
            counters.decide(kept)

    def answered(self, visit: Visit, queue_ms: float, bytes_down: int) -> None:
        """A step was answered."""
        self.counters.steps += 1
        self.counters.bytes_down += bytes_down
        visit.steps += 1
        visit.bytes_down += bytes_down
        self._queue.observe(queue_ms / 1e3)

    def dropped(self, visit: Visit) -> None:
        """A step was stale."""
        self.counters.stale_steps += 1
        visit.stale_steps += 1

    def passed(self, sessions: int, nodes: int, pass_ms: float) -> None:
        """A forward pass ended."""
        self._pass.observe(pass_ms / 1e3)
        self._company.observe(sessions)
        self._width.observe(nodes)

    def failed(self, session: int, code: str, kind: str | None = None) -> None:
        """A session ended with this code; ``kind`` is the type of an internal error. Its message is not
        told: those of other libraries can hold values of tensors."""
        level = logging.WARNING if kind is None else logging.ERROR
        write(level, "session_error", session=session, code=code, type=kind)
        self._count(code)

    def refused(self, code: str) -> None:
        """Somebody was sent away at the door."""
        write(logging.WARNING, "refused", code=code)
        self._count(code)

    def _count(self, code: str) -> None:
        self.counters.errors_by_code[code] += 1
        self._last_error = (code, self._clock())

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started

    def status(self) -> dict[str, Any]:
        """For ``GET /status``."""
        level, counters = self.level(), self.counters
        error = None
        if self._last_error is not None:
            code, at = self._last_error
            error = {"code": code, "seconds_ago": round(self._clock() - at, 1)}
        return {
            "status": "ok",
            **self.about,
            "uptime_s": round(self.uptime_s, 1),
            "sessions": {
                "connected": level.connected,
                "parked": level.parked,
                "most": level.most_sessions,
                "opened": counters.sessions_opened,
                "evicted": level.evicted,
            },
            "memory": {
                "kv_bytes": level.kv_bytes,
                "kv_idle_bytes": level.kv_idle_bytes,
                "kv_peak_bytes": level.kv_peak_bytes,
                "kv_budget_bytes": level.kv_budget_bytes,
            },
            "steps": {
                "answered": counters.steps,
                "stale": counters.stale_steps,
                "waiting": level.waiting_steps,
            },
            "tokens": counters.committed,
            "errors": {code: count for code, count in counters.errors_by_code.items() if count},
            "last_error": error,
        }

    def render(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"aparte_cloud_{name}", help, buckets=buckets, registry=self._registry)


class _Counted(Collector):
    """Reads the counts when Prometheus comes."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        counters, level = self._telemetry.counters, self._telemetry.level()
        yield InfoMetricFamily("aparte_cloud", "What is served.", self._telemetry.about)
        sessions = GaugeMetricFamily("aparte_cloud_sessions", "Sessions.", labels=["state"])
        sessions.add_metric(["connected"], level.connected)
        sessions.add_metric(["parked"], level.parked)
        yield sessions
        yield _gauge("sessions_limit", "Most sessions at a time.", level.most_sessions)
        yield _gauge("waiting_steps", "Steps that are in no pass at the moment.", level.waiting_steps)
        yield _gauge("kv_bytes", "Bytes of key-value cache of all sessions.", level.kv_bytes)
        yield _gauge("kv_idle_bytes", "Bytes kept for the caches of later sessions.", level.kv_idle_bytes)
        yield _gauge("kv_peak_bytes", "The most that there was of both together.", level.kv_peak_bytes)
        if level.kv_budget_bytes is not None:
            yield _gauge("kv_budget_bytes", "Most bytes of it.", level.kv_budget_bytes)
        yield _counter("sessions_opened", "New sessions.", counters.sessions_opened)
        yield _counter("sessions_resumed", "Sessions that went on.", counters.sessions_resumed)
        yield _counter("sessions_evicted", "Sessions that made room for others.", level.evicted)
        yield _counter("steps", "Steps answered.", counters.steps)
        yield _counter("stale_steps", "Steps dropped because nobody waited for them.", counters.stale_steps)
        yield _counter("nodes", "Nodes of the steps that came.", counters.nodes)
        yield _counter("committed_tokens", "Tokens committed, prompts included.", counters.committed)
        yield _counter("decided_steps", "Steps of which nodes were committed.", counters.decided_steps)
        yield _counter("received_bytes", "Bytes of steps.", counters.bytes_up)
        yield _counter("sent_bytes", "Bytes of results.", counters.bytes_down)
        accepted = CounterMetricFamily(
            "aparte_cloud_accepted", "Decided steps with a committed node at that depth.", labels=["position"]
        )
        for position, count in enumerate(counters.accepted, start=1):
            accepted.add_metric([str(position)], count)
        yield accepted
        errors = CounterMetricFamily(
            "aparte_cloud_errors", "Sessions ended and connections refused, by code.", labels=["code"]
        )
        for code, count in counters.errors_by_code.items():
            errors.add_metric([code], count)
        yield errors


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"aparte_cloud_{name}", help, value)


def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"aparte_cloud_{name}", help, value)
