"""The ways to divide the work between a device and a cloud, and draft mode's closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aparte.config import DtypeName
from aparte.measure.plan_presets import Known, look_up
from aparte.measure.plan_size import GB, Shape, whole_memory
from aparte.measure.plan_speed import (
    DRAFT_LENGTH,
    GIVEN,
    TOKENS_PER_CALL,
    Assumption,
    Own,
    Times,
    pass_ms,
    plain_layer_ms,
)


@dataclass(frozen=True)
class Mode:
    """One way to divide the work. ``cloud_sees`` is what leaves this machine."""

    name: str
    tok_s: float | None
    cloud_passes_per_token: float
    device_gb: float | None
    cloud_gb: float | None
    cloud_sees: str
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.name,
            "tok_s": rounded(self.tok_s),
            "cloud_passes_per_token": round(self.cloud_passes_per_token, 3),
            "device_gb": rounded(self.device_gb),
            "cloud_gb": rounded(self.cloud_gb),
            "cloud_sees": self.cloud_sees,
            "note": self.note,
        }


@dataclass(frozen=True)
class Draft:
    """Draft mode: the edge drafts ``length`` tokens, the cloud's whole model verifies them in one pass."""

    name: str
    device_gb: float
    edge_ms: float
    hosted_ms: float
    call_ms: float
    tokens: float
    length: int
    assumptions: tuple[Assumption, ...]

    @classmethod
    def of(
        cls,
        target: Known,
        name: str | None,
        *,
        times: Times,
        call_ms: float,
        dtype: DtypeName,
        context: int,
        own: Own,
    ) -> Draft | None:
        """For ``target`` with the draft model ``name``, else with the one its preset was published with."""
        pair = target.draft
        name = name or pair.get("model")
        if name is None:
            return None
        known = look_up(name)
        shape = Shape.of(known.config, name)
        edge_layer = known.measured.get("device_layer_ms") or plain_layer_ms(
            shape, times.device_bandwidth, dtype
        )
        hosted_layer = plain_layer_ms(shape, times.cloud_bandwidth, dtype)
        edge_ms = pass_ms(shape, edge_layer, times.device_bandwidth, dtype)
        is_pair = name == pair.get("model")
        source = pair["source"] if is_pair else "paper B, for a 1B draft of an 8B model: yours will differ"
        tokens = own.tokens_per_call or pair.get("tokens_per_call", TOKENS_PER_CALL)
        length = own.draft_length or pair.get("draft_length", DRAFT_LENGTH)
        notes = (
            Assumption(
                "tokens_per_call", tokens, "tokens per call", GIVEN if own.tokens_per_call else source
            ),
            Assumption(
                "draft_length",
                length,
                "drafted tokens per call",
                GIVEN if own.draft_length else "paper B's program",
            ),
            Assumption("draft_token_ms", edge_ms, "ms", "weights read once per token, as device_ms"),
        )
        return cls(
            name,
            whole_memory(shape, dtype, context).held / GB,
            edge_ms,
            pass_ms(shape, hosted_layer, times.cloud_bandwidth, dtype),
            call_ms,
            tokens,
            length,
            notes,
        )

    @property
    def rtt_limit_ms(self) -> float:
        """Edge drafting beats plain cloud decoding only below this round trip, for one user."""
        return draft_rtt_limit_ms(self.tokens, self.call_ms, self.length, self.edge_ms)

    def modes(self, rtt_ms: float, whole_gb: float) -> Sequence[Mode]:
        limit = self.rtt_limit_ms
        return (
            Mode(
                "draft",
                self.tokens * 1e3 / (rtt_ms + self.call_ms + self.length * self.edge_ms),
                1 / self.tokens,
                self.device_gb,
                whole_gb,
                "the text",
                f"{self.name} drafts; faster than plain cloud "
                + (f"while the round trip is below {limit:.0f} ms" if limit > 0 else "on no link")
                + "; always fewer passes",
            ),
            Mode(
                "co-located",
                self.tokens * 1e3 / (self.call_ms + self.length * self.hosted_ms),
                1 / self.tokens,
                0.0,
                whole_gb + self.device_gb,
                "the text",
                f"{self.name} drafts on the cloud",
            ),
        )


def draft_rtt_limit_ms(tokens: float, cloud_ms: float, length: int, edge_ms: float) -> float:
    """``(E[tau] - 1) t_cloud - d t_edge``: the round trip below which edge drafting beats the cloud alone."""
    return (tokens - 1) * cloud_ms - length * edge_ms


def rounded(value: float | None) -> float | None:
    """To four significant digits."""
    return value if value is None or value == 0 else round(value, 3 - math.floor(math.log10(abs(value))))
