"""What a split of a model would need and bring, from its configuration: memory, bytes, speed, cost, modes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aparte.config import Cut, DtypeName, WireName
from aparte.errors import UserError
from aparte.measure import plan_size
from aparte.measure.plan_measured import SEQUENTIAL, Measured
from aparte.measure.plan_modes import Draft, Mode, rounded
from aparte.measure.plan_presets import look_up
from aparte.measure.plan_queue import Crowd, Curve, enough, simulate
from aparte.measure.plan_size import GB, Memory, Shape
from aparte.measure.plan_speed import (
    CLOUD_NODE_SHARE,
    Assumption,
    Drafting,
    Own,
    Times,
    auto_drafting,
    drafting_of,
    pass_ms,
    step_bytes,
    step_ms,
    step_times,
    transfer_ms,
)

REFERENCE_RTT_MS = 80.0
RTTS_MS = (5.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 150.0)
PRIVACY = (
    "Depth is no protection: with the model's public weights the cloud can reconstruct prompt and answer "
    "from what it receives, at any cut (docs/privacy.md). Choose the cut for memory and speed."
)


@dataclass(frozen=True)
class Question:
    """What is to be planned. Round trips in ms, price per hour of the cloud."""

    model: str
    rtts_ms: tuple[float, ...] = RTTS_MS
    reference_rtt_ms: float = REFERENCE_RTT_MS
    mbps: float | None = None
    cut: Cut = field(default_factory=Cut)
    context: int = 2048
    users: int = 1
    price: float | None = None
    dtype: DtypeName = "auto"
    wire: WireName = "auto"
    draft: str | None = None
    own: Own = field(default_factory=Own)
    #: What ``aparte bench step --json`` or ``aparte bench load --json`` printed.
    measured: Path | None = None

    def __post_init__(self) -> None:
        for name, count in (("--context", self.context), ("--users", self.users)):
            if count < 1:
                raise UserError(f"{name} is {count}; it must be at least 1.")
        for rtt_ms in self.rtts_ms:
            if not (math.isfinite(rtt_ms) and rtt_ms >= 0):
                raise UserError(f"A round trip of {rtt_ms} ms is not possible; give 0 or more milliseconds.")
        numbers: dict[str, float | None] = {"--mbps": self.mbps, "--price": self.price}
        numbers |= {f"--{name.replace('_', '-')}": value for name, value in vars(self.own).items()}
        for name, value in numbers.items():
            low = 0 if name in ("--price", "--nodes", "--device-ms", "--codec-ms", "--node-ms") else 1e-9
            if value is not None and not (math.isfinite(value) and value >= low):
                raise UserError(f"{name} is {value:g}; it must be {'0 or more' if not low else 'above 0'}.")
        for name in ("mat", "tokens_per_call"):
            value = getattr(self.own, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value:g}; a step brings at least 1 token.")


class Plan:
    """The answer to a :class:`Question`."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.known = look_up(question.model)
        self.shape = Shape.of(self.known.config, question.model)
        question.cut.check(self.shape.layers)
        if question.context > self.shape.max_context:
            raise UserError(
                f"{question.model} has a context of {self.shape.max_context} tokens, and --context is "
                f"{question.context}. Use a smaller one."
            )
        cut, dtype, context = question.cut, question.dtype, question.context
        self.device: Memory = plan_size.device_memory(self.shape, cut, dtype, context)
        self.cloud: Memory = plan_size.cloud_memory(self.shape, cut, dtype, context, question.users)
        self.times: Times = step_times(self.shape, self.known, cut, dtype, question.own)
        self.drafting = drafting_of(self.known, question.own)
        self.measured = None if question.measured is None else Measured.read(question.measured, question.cut)
        self.auto = self._auto()
        self.curve = self._curve()
        self.wire_bytes = 4 if question.wire == "float32" else 2
        self.draft = Draft.of(
            self.known,
            question.draft,
            times=self.times,
            call_ms=self.cloud_pass_ms,
            dtype=dtype,
            context=context,
            own=question.own,
        )

    @property
    def bytes_per_token(self) -> int:
        """A node's hidden state, one way."""
        return self.shape.hidden * self.wire_bytes

    def tok_s(self, rtt_ms: float, drafting: Drafting | None) -> float:
        """Tokens per second of one user while all ``users`` are busy.

        Their steps share passes; what they get of one cloud is simulated (:mod:`aparte.measure.plan_queue`).
        """
        crowd = self.crowd(rtt_ms, drafting)
        if crowd.users > 1:
            return simulate(crowd, self.curve).tok_s / crowd.users
        return crowd.tokens * 1e3 / self._alone_ms(rtt_ms, drafting)

    def crowd(self, rtt_ms: float, drafting: Drafting | None) -> Crowd:
        """The users, and how long each is away between an answer of the cloud and the next step there."""
        nodes = 1.0 + (drafting.nodes if drafting else 0.0)
        away_ms = max(0.0, self._alone_ms(rtt_ms, drafting) - self.curve(nodes))
        return Crowd(self.question.users, away_ms, nodes, drafting.tokens if drafting else 1.0)

    def fleet(self) -> dict[str, list[dict[str, Any]]]:
        """What all users get of more and more replicas at the reference round trip; empty for one user."""
        if self.question.users == 1:
            return {}
        rtt_ms = self.question.reference_rtt_ms
        return {
            name: [one.to_json() for one in enough(self.crowd(rtt_ms, drafting), self.curve)]
            for name, drafting in (("sequential", None), ("auto", self.auto))
        }

    def _alone_ms(self, rtt_ms: float, drafting: Drafting | None) -> float:
        """A step of one user, with nobody else there."""
        nodes = drafting.nodes if drafting else 0.0
        size = step_bytes(self.shape, self.wire_bytes, nodes)
        steps = self.measured.steps if self.measured else None
        if steps is None:
            return step_ms(self.times, rtt_ms, self.question.mbps, size, drafting)
        there = transfer_ms(step_bytes(self.shape, self.wire_bytes, steps.nodes - 1), steps.mbps)
        alone_ms = rtt_ms + max(0.0, steps.rest_ms - there) + transfer_ms(size, self.question.mbps)
        if drafting is None or steps.decode != SEQUENTIAL:
            return alone_ms + self.curve(1 + nodes)
        # Measured without drafts: what those cost on both sides is assumed as without a measurement.
        return alone_ms + self.curve(1) + drafting.extra_ms + drafting.nodes * self.times.node_ms

    def _auto(self) -> Drafting:
        steps = self.measured.steps if self.measured else None
        if self.measured is None or steps is None or steps.decode == SEQUENTIAL:
            return auto_drafting()
        source = f"{self.question.measured.name if self.question.measured else ''}: --decode {steps.decode}"
        return Drafting(steps.tokens, steps.nodes - 1, 0.0, source)

    def _curve(self) -> Curve:
        if self.measured is not None:
            return self.measured.curve
        cloud_ms = self.times.cloud_ms
        return Curve.straight(
            cloud_ms,
            CLOUD_NODE_SHARE * cloud_ms,
            f"an assumption: each node of a shared pass adds {CLOUD_NODE_SHARE:.0%} of a pass, as memory "
            "bounds a GPU; give --measured for yours",
        )

    def projection(self, rtt_ms: float) -> dict[str, Any]:
        """One row of the table of speeds."""
        row: dict[str, Any] = {"rtt_ms": rtt_ms, "mbps": self.question.mbps}
        for name, drafting in (
            ("sequential", None),
            ("speculative", self.drafting),
            ("auto", self.auto),
        ):
            speed = self.tok_s(rtt_ms, drafting)
            row[f"{name}_tok_s"] = rounded(speed)
            row[f"{name}_cost_per_million"] = self.cost_per_million(speed, self.question.users)
        row["rtt_to_compute"] = rounded(rtt_ms / self.times.cloud_ms)
        return row

    def cost_per_million(self, tok_s: float, users: int = 1) -> float | None:
        """Of a million tokens, while so many users are busy."""
        if self.question.price is None:
            return None
        return rounded(self.question.price / 3600 / (tok_s * users) * 1e6)

    def modes(self) -> list[Mode]:
        """The ways to divide the work, at the reference round trip, for one user."""
        question, shape, times = self.question, self.shape, self.times
        rtt_ms = question.reference_rtt_ms
        whole = plan_size.whole_memory(shape, question.dtype, question.context).held / GB
        split_ms = self._alone_ms(rtt_ms, self.drafting)
        sequential = 1e3 / self._alone_ms(rtt_ms, None)
        split = max(sequential, self.drafting.tokens * 1e3 / split_ms)
        middle = shape.layers - question.cut.front - question.cut.back
        alone_ms = times.device_ms + middle * times.device_layer_ms
        return [
            Mode(
                "split",
                split,
                1.0 if split == sequential else 1 / self.drafting.tokens,
                self.device.held / GB,
                self.cloud.held / GB,
                "hidden states, from which text can be reconstructed: docs/privacy.md",
                "sequential is faster here" if split == sequential else "",
            ),
            *(self.draft.modes(rtt_ms, whole) if self.draft else ()),
            Mode("plain cloud", 1e3 / self.cloud_pass_ms, 1.0, 0.0, whole, "the text", "streamed"),
            Mode("device only", 1e3 / alone_ms, 0.0, whole, 0.0, "nothing", "if it fits"),
        ]

    @property
    def cloud_pass_ms(self) -> float:
        """The whole model on the cloud, one position."""
        times = self.times
        return pass_ms(self.shape, times.cloud_layer_ms, times.cloud_bandwidth, self.question.dtype)

    def assumptions(self) -> list[Assumption]:
        """Everything that was not computed from the configuration."""
        drafting = self.drafting
        found = [*self.times.assumptions]
        found.append(Assumption("mat", drafting.tokens, "tokens per step", drafting.source))
        found.append(Assumption("nodes", drafting.nodes, "speculative nodes per step", drafting.source))
        if drafting.extra_ms:
            found.append(Assumption("drafting_ms", drafting.extra_ms, "ms per step", drafting.source))
        if drafting != self.auto:
            found.append(Assumption("auto_mat", self.auto.tokens, "tokens per step", self.auto.source))
            found.append(Assumption("auto_nodes", self.auto.nodes, "nodes per step", self.auto.source))
        if self.draft:
            found += self.draft.assumptions
        if self.measured and (steps := self.measured.steps):
            says = f"{self.curve.source}: median step less pass, queue and round trip of the fewest devices"
            found.append(Assumption("rest_ms", steps.rest_ms, f"ms, --decode {steps.decode}", says))
        if self.question.users > 1:
            full_ms = self.curve(self.curve.full)
            found.append(
                Assumption("full_pass_ms", full_ms, f"ms, {self.curve.full} nodes", self.curve.source)
            )
            found.append(
                Assumption("users", self.question.users, "busy at a time", "their steps share passes")
            )
        return found

    def printed(self) -> dict[str, Any]:
        """What the preset's paper prints for the same cut in 16 bits, with the difference."""
        question, printed = self.question, dict(self.known.printed)
        if not printed or question.cut != Cut() or plan_size.weight_bytes(question.dtype) != 2:
            return {}
        note = printed.pop("note", "")
        here = {
            "device_gb": self.device.weights / GB,
            "bytes_per_token": float(self.bytes_per_token),
            "rtt_to_compute": REFERENCE_RTT_MS / self.times.cloud_ms,
        }
        return {
            name: {
                "paper": value,
                "here": rounded(here[name]),
                "difference": round(here[name] / value - 1, 3),
            }
            for name, value in printed.items()
        } | {"note": note, "source": self.known.measured["source"]}

    def to_json(self) -> dict[str, Any]:
        """The fields of design section 8, and more."""
        question, modes = self.question, self.modes()
        return {
            "model": question.model,
            "source": self.known.source,
            "params": self.shape.params,
            "layers": self.shape.layers,
            "hidden_size": self.shape.hidden,
            "cut": str(question.cut),
            "dtype": question.dtype,
            "wire": question.wire,
            "context": question.context,
            "users": question.users,
            "price_per_hour": question.price,
            "device_gb": rounded(self.device.held / GB),
            "cloud_gb": rounded(self.cloud.held / GB),
            "device": self.device.to_json(),
            "cloud": self.cloud.to_json(),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_step": {
                "sequential": round(step_bytes(self.shape, self.wire_bytes, 0)),
                "speculative": round(step_bytes(self.shape, self.wire_bytes, self.drafting.nodes)),
                "auto": round(step_bytes(self.shape, self.wire_bytes, self.auto.nodes)),
            },
            "step_ms": {
                "device": rounded(self.times.device_ms),
                "cloud": rounded(self.times.cloud_ms),
                "codec": rounded(self.times.codec_ms),
                "fixed": rounded(self.times.fixed_ms),
                "cloud_whole_model": rounded(self.cloud_pass_ms),
            },
            "reference_rtt_ms": question.reference_rtt_ms,
            "rtt_to_compute": rounded(question.reference_rtt_ms / self.times.cloud_ms),
            "projections": [self.projection(rtt_ms) for rtt_ms in question.rtts_ms],
            "fleet": self.fleet(),
            "compared": self.measured.compared() if self.measured else [],
            "modes": [
                mode.to_json()
                | {
                    "cost_per_million": self.cost_per_million(mode.tok_s)
                    if mode.cloud_gb and mode.tok_s
                    else None
                }
                for mode in modes
            ],
            "fastest": max(modes, key=lambda mode: mode.tok_s or 0.0).name,
            "text_stays_here": [mode.name for mode in modes if mode.cloud_sees == "nothing"],
            "no_text_sent": [mode.name for mode in modes if mode.cloud_sees != "the text"],
            "draft_rtt_limit_ms": rounded(self.draft.rtt_limit_ms) if self.draft else None,
            "assumptions": [assumption.to_json() for assumption in self.assumptions()],
            "printed": self.printed(),
            "privacy": PRIVACY,
        }
