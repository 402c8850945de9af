"""What becomes of an answer when its cloud goes away: when to try again, and when to give up.

The device owns the truth, so nothing is ever lost with a connection. If the cloud, found again, still has the
session, the target sends what was not answered once more and the answer goes on as if nothing had been. If
not, :class:`CacheLostError` tells the loop to prefill again.

Attempts are spread out: each wait is a random part of twice the last one's limit, so that the devices of a
cloud that was restarted do not all come at once. They are counted from the last progress of the answer, so
that a bad line costs time, and a cloud that fails at one and the same step every time is given up.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator

from aparte.config import LinkSettings
from aparte.deadline import Deadline
from aparte.errors import GivenUpError, LinkError, SilenceError
from aparte.target.base import Evaluation, Target

#: Seconds before the second attempt, and so on, are never less than this share of their limit.
LEAST_SHARE = 0.5


class CacheLostError(Exception):
    """The target is there again, without anything that it held."""


class Recovery:
    """Bears with a target's link, for one answer at a time."""

    def __init__(
        self,
        settings: LinkSettings | None = None,
        deadline: Deadline | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        share: Callable[[], float] = random.random,
    ) -> None:
        """Without ``settings`` nothing is tried again. ``share`` gives numbers between 0 and 1."""
        self._settings = settings or LinkSettings(retries=0)
        self._deadline = deadline or Deadline()
        self._sleep = sleep
        self._share = share
        self._attempts = 0  # since the last progress
        self._furthest = 0
        #: Connections lost in the middle of an answer since the beginning.
        self.lost = 0

    @contextlib.contextmanager
    def answer(self) -> Iterator[None]:
        """For as long as one answer is written."""
        self._attempts = self._furthest = 0
        self._deadline.start()
        try:
            yield
        finally:
            self._deadline.stop()

    def open(self, target: Target) -> bool:
        """Like the target's own ``open``, as often as the settings allow."""
        try:
            return target.open()
        except LinkError as error:
            return self._try_again(target, error)

    def collect(self, target: Target) -> Evaluation:
        """Like the target's own ``collect``. Raises :class:`CacheLostError` if everything has to be sent
        again, and :class:`LinkError` if the cloud is given up."""
        while True:
            self._deadline.check()
            try:
                return target.collect()
            except LinkError as error:
                self.lost += 1
                if not self._try_again(target, error):
                    raise CacheLostError from None

    def reached(self, position: int) -> None:
        """The answer, or the reading of its prompt, has got as far as ``position``."""
        if position > self._furthest:
            self._furthest = position
            self._attempts = 0

    def _try_again(self, target: Target, error: LinkError) -> bool:
        first = error
        while True:
            if isinstance(error, GivenUpError) or not self._settings.retries:
                raise error
            if isinstance(error, SilenceError) and not error.elsewhere:
                raise error
            if self._attempts >= self._settings.retries:
                raise self._given_up(first, error) from error
            wait_s = max(self._wait_s(), error.retry_after_s)
            if wait_s >= self._deadline.left_s:
                raise self._deadline.error() from error
            self._sleep(wait_s)
            self._attempts += 1
            try:
                return target.open()
            except LinkError as again:
                error = again

    def _wait_s(self) -> float:
        limit = min(self._settings.first_wait_s * 2.0**self._attempts, self._settings.longest_wait_s)
        least = LEAST_SHARE if self._attempts else 0.0
        return limit * (least + (1 - least) * self._share())

    def _given_up(self, first: LinkError, last: LinkError) -> GivenUpError:
        reason = "" if str(last) == str(first) else f" The last time: {last}"
        return GivenUpError(
            f"{first} It was tried again {self._attempts} times in vain.{reason} What was written until then "
            "is valid. Ask again when the cloud is back, or name another one with a second --cloud."
        )
