"""One answer of a SPADE bench: what it took, and how it is told to be the same as another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from aparte.answer import Answer
from aparte.measure.simulated_link import SimulatedLink, link_ms


@dataclass(frozen=True)
class Run:
    """One answer, without its prompt. Times in ms.

    ``wall_ms`` is all of it, ``compute_ms`` everything but the link, where one step is under way at a time;
    ``cloud_ms`` includes what the cloud computed for nothing. ``ahead`` of the steps were sent before the one
    before was back, and kept; ``stale`` further ones were sent for nothing.
    """

    tokens: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    cloud_ms: float = 0.0
    edge_ms: float = 0.0
    compute_ms: float = 0.0
    wall_ms: float = 0.0
    ahead: int = 0
    stale: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_states: int = 0
    #: A hash of the token ids, and the text where there is a reference to compare it with.
    digest: str = ""
    text: str | None = None

    @classmethod
    def of(cls, answer: Answer, link: SimulatedLink, cloud_ms: float, bytes_states: int) -> Run:
        """What an answer took that was written over a simulated link, by the cloud in ``cloud_ms``."""
        steps = answer.steps
        wall_ms = sum(step.step_ms for step in steps)
        # The answer's last step may have been cut; what was accepted of it is what was kept.
        accepted = [min(step.drafted, step.accepted - 1) for step in steps]
        whole = zip(steps[:-1], accepted, strict=False)
        return cls(
            tokens=len(answer.token_ids),
            steps=len(steps),
            drafted=sum(step.drafted for step in steps),
            accepted=sum(accepted),
            rejected=sum(step.drafted > right for step, right in whole),
            cloud_ms=cloud_ms,
            edge_ms=sum(step.draft_ms for step in steps),
            compute_ms=wall_ms - link_ms(link.profile, len(steps), answer.bytes_up + answer.bytes_down),
            wall_ms=wall_ms,
            ahead=answer.ahead_steps,
            stale=answer.stale_steps,
            bytes_up=answer.bytes_up,
            bytes_down=answer.bytes_down,
            bytes_states=bytes_states,
            digest=digest(answer.token_ids),
            text=answer.text,
        )


@dataclass(frozen=True)
class Prompt:
    """What reading the prompt took, on both sides."""

    tokens: int
    cloud_ms: float
    edge_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


def digest(tokens: Sequence[int]) -> str:
    """A hash of token ids, so that two answers can be told to be the same."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]
