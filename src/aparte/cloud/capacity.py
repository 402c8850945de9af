"""How many replicas of the server there should be. Imports nothing heavy: Ray Serve's controller asks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from aparte.config import ServerLimits
from aparte.errors import UserError

#: Steps that a replica has in hand, waiting and computed, on average, before another one is wanted. So many
#: share a pass, and nobody waits for much longer than one pass.
STEPS_IN_HAND = 4.0
#: The same for its places for sessions.
SHARE_OF_SESSIONS = 0.8


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


def wanted(in_hand: float, sessions: float, most_sessions: int) -> int:
    """Replicas for so many steps in hand and sessions, at least one."""
    by_steps = in_hand / STEPS_IN_HAND
    by_sessions = sessions / (SHARE_OF_SESSIONS * most_sessions)
    return max(1, math.ceil(round(max(by_steps, by_sessions), 6)))


def wanted_replicas(
    context: Any, most_sessions: int = ServerLimits.max_sessions
) -> tuple[int, dict[str, Any]]:
    """Ray Serve's question how many replicas there should be, answered by queue and sessions.

    It looks at averages over some time (``look_back_period_s``). Sessions that are open stay where they are,
    so a new replica relieves the others by taking those that come.
    """
    found = context.aggregated_metrics or {}
    totals = {name: sum((found.get(name) or {}).values()) for name in ("in_hand", "sessions")}
    return wanted(totals["in_hand"], totals["sessions"], most_sessions), {}
