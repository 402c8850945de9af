"""How many replicas of the server there should be. Imports nothing heavy: Ray Serve's controller asks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from aparte.errors import UserError

#: Steps that a replica has in hand, waiting and computed, on average, before another one is wanted. So many
#: share a pass, and nobody waits for much longer than one pass.
STEPS_IN_HAND = 4.0
#: The same for its places for sessions.
SHARE_OF_SESSIONS = 0.8
#: What is looked at is an average over so long. Another replica is started when one was wanted for so long
#: without a break, and one is stopped when it was not needed for so long: loading takes a while, and the
#: sessions of one that stops have to prefill elsewhere.
LOOK_BACK_S = 30.0
UP_AFTER_S = 30.0
DOWN_AFTER_S = 600.0


@dataclass(frozen=True)
class Replicas:
    """How many: from ``least`` to ``most``; None is what the cluster has room for."""

    least: int
    most: int | None

    @classmethod
    def parse(cls, text: str) -> Replicas:
        """Read ``3``, ``auto`` or ``1-8``. Raises :class:`UserError`."""
        if text == "auto":
            return cls(1, None)
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise UserError(f"--replicas {text} is no number of replicas. Use one like 2, 1-8, or auto.")
        return cls(least, most)


def needs(in_hand: float, sessions: float, most_sessions: int) -> dict[str, float]:
    """Replicas that the load of one of them would fill, by steps in hand and by sessions.

    It has places for ``most_sessions``.
    """
    return {
        "by_steps": in_hand / STEPS_IN_HAND,
        "by_sessions": sessions / (SHARE_OF_SESSIONS * most_sessions),
    }


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's question how many replicas there should be, answered by queue and sessions; at least one.

    It gives what replicas say of :func:`needs`, averaged over :data:`LOOK_BACK_S`. Sessions that are open
    stay where they are, so a new replica relieves the others by taking those that come.
    """
    found = context.aggregated_metrics or {}
    totals = [sum((found.get(name) or {}).values()) for name in ("by_steps", "by_sessions")]
    return max(1, math.ceil(round(max(totals), 6))), {}
