"""Constant shape: every step has the same number of nodes and bytes and, with a cadence, its time.

Against attack 6 (arXiv 2411.01076), in which an observer outside the encryption tells from sizes and times
what is being answered. What stays visible is the number of steps, prompt's and answer's together, and with a
cadence that is too short for the link, which steps took longer than it. The cloud itself also sees which
nodes are committed, so it can tell filling from guesses once the next step is there.

Filling looks like guesses: tokens of this conversation, hung below nodes of the step, computed by the same
front. It is written over by the next step, as rejected guesses are, and never becomes part of the text.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aparte.errors import UserError
from aparte.step import ROOT, Step
from aparte.wire.padding import pad_header

#: Most nodes per step: the limit of ``--max-nodes``, and the token that is pending.
MOST_NODES = 257
#: Room in a header: for its counters, and for a parent's slot of up to ten digits.
HEADER_BYTES = 128
HEADER_BYTES_PER_NODE = 11
#: Tokens to draw filling from: the last ones that were sent.
RECENT = 512
#: Late by less than this is on time.
SLACK_S = 0.002


@dataclass(frozen=True)
class ShapeSettings:
    """So many nodes per step, and a step every so many milliseconds, or as soon as there is one."""

    nodes: int
    cadence_ms: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise UserError(
                f"--constant-shape {self.nodes} is out of range: a step has 1 to {MOST_NODES} nodes."
            )
        if self.cadence_ms is not None and not (math.isfinite(self.cadence_ms) and self.cadence_ms > 0):
            raise UserError(f"The cadence is {self.cadence_ms} ms; it must be a positive number.")

    @classmethod
    def parse(cls, text: str) -> ShapeSettings:
        """Read ``N`` or ``N@MS``."""
        nodes, at, cadence = text.partition("@")
        try:
            return cls(int(nodes), float(cadence) if at else None)
        except ValueError:
            raise UserError(
                f"--constant-shape {text!r} is not of the form N or N@MS; for example 16@200 for 16 nodes "
                "every 200 ms."
            ) from None


class ConstantShape:
    """The shape of one session's steps."""

    def __init__(
        self,
        settings: ShapeSettings,
        max_context: int,
        *,
        draw: random.Random | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``draw`` picks the filling; by default in a way that nobody can foretell."""
        self._settings = settings
        self._max_context = max_context
        self._draw = random.SystemRandom() if draw is None else draw
        self._clock = clock
        self._sleep = sleep
        self._depths: dict[int, int] = {ROOT: -1}  # position by slot
        self._recent: list[int] = []
        self._due: float | None = None
        #: Steps since the beginning, and those among them that missed their time.
        self.steps = 0
        self.late = 0

    @property
    def nodes(self) -> int:
        return self._settings.nodes

    def begin(self) -> None:
        self._due = None

    def fill(self, step: Step, tokens: Sequence[int]) -> tuple[Step, Sequence[int]]:
        """Raises :class:`UserError` if the step is larger than the shape."""
        if len(step) > self.nodes:
            raise UserError(f"A step has {len(step)} nodes and its shape only {self.nodes}.")
        self._recent = [*self._recent, *tokens][-RECENT:]
        for slot, parent in zip(step.slots, step.parents, strict=True):
            self._depths[slot] = self._depths[parent] + 1
        # Below the end of the context there is no position; the step's own parents are above it.
        places = [slot for slot in step.slots if self._depths[slot] + 1 < self._max_context]
        places = places or list(step.parents)
        parents, filled = list(step.parents), list(tokens)
        while len(parents) < self.nodes:
            parent = self._draw.choice(places)
            slot = step.base + len(parents)
            self._depths[slot] = self._depths[parent] + 1
            if self._depths[slot] + 1 < self._max_context:
                places.append(slot)
            parents.append(parent)
            filled.append(self._draw.choice(self._recent))
        return Step(step.number, step.epoch, step.commit, step.base, tuple(parents)), filled

    def seal(self, message: bytes) -> bytes:
        return pad_header(message, HEADER_BYTES + HEADER_BYTES_PER_NODE * self.nodes)

    def wait(self) -> None:
        self.steps += 1
        if self._settings.cadence_ms is None:
            return
        every_s, now = self._settings.cadence_ms / 1e3, self._clock()
        due = now if self._due is None else self._due
        if now > due + SLACK_S:
            self.late += 1
            due += math.ceil((now - due) / every_s) * every_s
        self._due = due + every_s
        if due > now:
            self._sleep(due - now)
