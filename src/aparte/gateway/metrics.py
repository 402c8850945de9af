"""Numbers for Prometheus. They count; they never hold text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from aparte.answer import Answer
from aparte.pool import Pool

SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)


class Metrics:
    """Of one gateway; several may live in one process."""

    def __init__(self, pool: Pool) -> None:
        self._registry = CollectorRegistry()
        about: dict[str, Any] = {"registry": self._registry, "namespace": "aparte"}
        self._requests = Counter(
            "gateway_requests", "Requests by endpoint and status.", ["endpoint", "status"], **about
        )
        self._prompt = Counter("gateway_prompt_tokens", "Tokens of prompts.", **about)
        self._reused = Counter("gateway_reused_tokens", "Prompt tokens that the cloud still held.", **about)
        self._written = Counter("gateway_completion_tokens", "Tokens written.", **about)
        self._trips = Counter("gateway_round_trips", "Round trips whose result was used.", **about)
        self._bytes = Counter("gateway_bytes", "Bytes of frames, by direction.", ["direction"], **about)
        self._first = Histogram(
            "gateway_first_token_seconds", "Time to first token.", buckets=SECONDS, **about
        )
        self._whole = Histogram("gateway_answer_seconds", "Time of an answer.", buckets=SECONDS, **about)
        self._parts = Counter(
            "gateway_time_seconds",
            "Time of answers by the part it went to: network latency, transfer up and down, device, codec "
            "(number formats), cloud, queue there, and the rest.",
            ["part"],
            **about,
        )
        busy = Gauge("gateway_busy_sessions", "Sessions with an answer under way.", **about)
        busy.set_function(lambda: pool.busy)
        waiting = Gauge("gateway_waiting_answers", "Answers that wait for a session.", **about)
        waiting.set_function(lambda: pool.waiting)

    def request(self, endpoint: str, status: int) -> None:
        """A request was answered; 499 is a client that left."""
        self._requests.labels(endpoint, str(status)).inc()

    def answer(self, answer: Answer) -> None:
        """An answer ended, for whatever reason."""
        self._prompt.inc(answer.prompt_tokens)
        self._reused.inc(answer.reused_tokens)
        self._written.inc(len(answer.token_ids))
        self._trips.inc(answer.round_trips)
        self._bytes.labels("up").inc(max(0, answer.bytes_up))
        self._bytes.labels("down").inc(max(0, answer.bytes_down))
        if answer.token_ids:
            self._first.observe(answer.ttft_ms / 1e3)
            self._whole.observe(answer.elapsed_s)
            for name, value in asdict(answer.decomposition().settled()).items():
                self._parts.labels(name.removesuffix("_ms")).inc(value / 1e3)

    def render(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self._registry)
