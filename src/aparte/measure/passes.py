"""What a cloud's forward passes took so far, from its own counts (``GET /metrics``)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from aparte.errors import AparteError
from aparte.measure.doctor_path import Door, get

_NAMES = {
    "aparte_cloud_pass_seconds_count": "count",
    "aparte_cloud_pass_seconds_sum": "seconds",
    "aparte_cloud_pass_nodes_sum": "nodes",
    "aparte_cloud_pass_sessions_sum": "sessions",
}


@dataclass(frozen=True)
class Passes:
    """So many passes, and sums over them."""

    count: float = 0.0
    seconds: float = 0.0
    nodes: float = 0.0
    sessions: float = 0.0

    @classmethod
    def read(cls, door: Door) -> Passes:
        """All since the server's start. Raises :class:`AparteError` if it does not tell."""
        try:
            status, body, _ = get(door, "/metrics", door.token)
            if status != 200:
                raise AparteError(f"The cloud does not tell its counts (HTTP status {status}).")
            found = {
                _NAMES[sample.name]: sample.value
                for family in text_string_to_metric_families(body.decode())
                for sample in family.samples
                if sample.name in _NAMES
            }
        except (OSError, ValueError) as error:
            raise AparteError(f"The cloud does not tell its counts ({type(error).__name__}).") from None
        if len(found) < len(_NAMES):
            raise AparteError("The cloud does not tell its counts. Is it the same version of aparte?")
        return cls(**found)

    def __sub__(self, before: Passes) -> Passes:
        return Passes(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))

    def __add__(self, other: Passes) -> Passes:
        return Passes(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def to_json(self) -> dict[str, Any]:
        """Averages of a pass; null if there was none."""
        many = self.count > 0
        return {
            "passes": int(self.count),
            "pass_ms": round(self.seconds / self.count * 1e3, 3) if many else None,
            "pass_nodes": round(self.nodes / self.count, 3) if many else None,
            "pass_sessions": round(self.sessions / self.count, 3) if many else None,
        }
