"""Several clouds that serve the same: where one cannot be reached, the next one is asked.

Which one is next: the next one named, or the one that is nearest. For the latter all of them are measured at
the same time, each over a connection of its own, when a cloud is to be chosen.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence

from aparte.errors import AparteError, LinkError, SilenceError
from aparte.wire.frames import Frame
from aparte.wire.websocket import WebSocketLink

#: When one cloud has answered, others are waited for this much longer, and at least so many seconds.
PATIENCE = 2.0
LEAST_PATIENCE_S = 0.5


class Failover:
    """One session, at one of several clouds at a time: at first the first that answers, in their order."""

    def __init__(self, links: Sequence[WebSocketLink], *, nearest: bool = False) -> None:
        """With ``nearest`` their order is that of their distance, and that in which they are named counts
        for those that do not answer."""
        self._links = tuple(links)
        self._nearest = nearest and len(self._links) > 1
        self._at = 0
        self._chosen = False  # whether the cloud at ``_at`` is the one that has the session
        self._silent_ones: set[int] = set()
        self._silent = 0  # clouds that did not answer since the last one that did

    @property
    def current(self) -> WebSocketLink:
        """The link to the cloud that has the session, or had it last."""
        return self._links[self._at]

    @property
    def where(self) -> str:
        return self.current.where

    @property
    def max_nodes(self) -> int:
        return self.current.max_nodes

    @property
    def max_context(self) -> int:
        return self.current.max_context

    def open(self) -> bool:
        """Begins with the cloud that had the session, which may still have it."""
        failures: list[AparteError] = []
        for at in self._candidates():
            try:
                kept = self._links[at].open()
            except AparteError as error:
                failures.append(error)
                continue
            if not kept:
                # What another one kept is no longer what this device has.
                for other in (*self._links[:at], *self._links[at + 1 :]):
                    other.close()
            self._at = at
            self._chosen = True
            return kept
        raise failures[0] if len(failures) == 1 else self._all_failed(failures)

    def _candidates(self) -> Iterator[int]:
        """Which links to try, one after the other; those behind the first are only measured if need be."""
        count = len(self._links)
        if not self._nearest:
            yield from ((self._at + turn) % count for turn in range(count))
            return
        first = [self._at] if self._chosen else []
        last = sorted(self._silent_ones.difference(first))
        yield from first
        yield from self._by_distance([at for at in range(count) if at not in (*first, *last)])
        yield from last

    def _by_distance(self, candidates: list[int]) -> list[int]:
        """The nearest first; behind them, in their order, those that did not answer in time."""
        measured: dict[int, float] = {}
        news = threading.Condition()
        waiting = set(candidates)

        def measure(at: int) -> None:
            found = math.inf
            with contextlib.suppress(AparteError):  # why will be told by the attempt to use it
                found = self._links[at].measure()
            with news:
                measured[at] = found
                waiting.discard(at)
                news.notify_all()

        started = time.monotonic()
        for at in candidates:
            threading.Thread(target=measure, args=(at,), name="measure", daemon=True).start()
        with news:
            news.wait_for(lambda: not waiting or any(value < math.inf for value in measured.values()))
            taken_s = time.monotonic() - started
            news.wait_for(lambda: not waiting, max(LEAST_PATIENCE_S, PATIENCE * taken_s))
            distances = dict(measured)
        return sorted(candidates, key=lambda at: distances.get(at, math.inf))

    def send(self, message: bytes) -> None:
        self.current.send(message)

    def receive(self) -> tuple[Frame, int]:
        try:
            answer = self.current.receive()
        except SilenceError as error:
            self._silent += 1
            self._silent_ones.add(self._at)
            self._chosen = False
            if self._silent < len(self._links):
                self._at = (self._at + 1) % len(self._links)
                error.elsewhere = True
            raise
        self._silent = 0
        self._silent_ones.clear()
        return answer

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _all_failed(self, failures: list[AparteError]) -> AparteError:
        """One of them that may yet be reached is worth another attempt, whatever is wrong with the others."""
        away = [error for error in failures if isinstance(error, LinkError)]
        if not away:
            return failures[0]
        told = " ".join(str(error) for error in failures)
        error = LinkError(f"None of the {len(self._links)} clouds can be reached. {told}")
        error.retry_after_s = min(one.retry_after_s for one in away)
        return error
