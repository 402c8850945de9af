"""Several clouds that serve the same: where one cannot be reached, the next one is asked."""

from __future__ import annotations

from collections.abc import Sequence

from aparte.errors import AparteError, LinkError, SilenceError
from aparte.wire.frames import Frame
from aparte.wire.websocket import WebSocketLink


class Failover:
    """One session, at one of several clouds at a time: at first the first that answers, in their order."""

    def __init__(self, links: Sequence[WebSocketLink]) -> None:
        self._links = tuple(links)
        self._at = 0
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
        for turn in range(len(self._links)):
            at = (self._at + turn) % len(self._links)
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
            return kept
        raise failures[0] if len(failures) == 1 else self._all_failed(failures)

    def send(self, message: bytes) -> None:
        self.current.send(message)

    def receive(self) -> tuple[Frame, int]:
        try:
            answer = self.current.receive()
        except SilenceError as error:
            self._silent += 1
            if self._silent < len(self._links):
                self._at = (self._at + 1) % len(self._links)
                error.elsewhere = True
            raise
        self._silent = 0
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
