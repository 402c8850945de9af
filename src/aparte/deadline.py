"""The time that an answer may take: set where it begins, kept wherever it has to wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from aparte.errors import GivenUpError


class Deadline:
    """Runs from :meth:`start`; before that, and without a limit, there is no end."""

    def __init__(self, limit_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._limit_s = limit_s
        self._clock = clock
        self._ends_at = math.inf

    def start(self) -> None:
        """An answer begins."""
        if self._limit_s is not None:
            self._ends_at = self._clock() + self._limit_s

    def stop(self) -> None:
        """The answer has ended."""
        self._ends_at = math.inf

    @property
    def left_s(self) -> float:
        """Seconds left, infinity if there is no end, below 0 if it is over."""
        return self._ends_at - self._clock()

    def check(self) -> None:
        """Raises :class:`GivenUpError` if the time is over."""
        if self.left_s <= 0:
            raise self.error()

    def error(self) -> GivenUpError:
        """What to raise once the time is over, or sure to be over before anything comes."""
        return GivenUpError(
            f"The answer was not finished within {self._limit_s:g} s, the limit for an answer "
            "(--answer-timeout). What was written until then is valid. Raise the limit, or ask for fewer "
            "tokens."
        )
