"""What the holder of a token may have: sessions at a time, tokens and bytes per second.

Rates hold for all sessions of a token together. What is used is paid for afterwards: a step is computed at
once if everything before it is paid for, and otherwise waits until it is. The server goes on reading
meanwhile, so that pings are answered, until the session's queue is full. A step that would have to wait for
more than :data:`LONGEST_WAIT_S` is refused, and so is a connection: the device is told when to come again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection

from aparte.cloud.keys import Keyring, Owner
from aparte.cloud.sessions import LimitError
from aparte.config import TokenLimits
from aparte.errors import AparteError

#: For how long a step may wait for the rate of its token. Devices wait for 120 s by default.
LONGEST_WAIT_S = 60.0
#: So many seconds' worth may be used at once after a pause.
BURST_S = 5.0
#: What a device is asked to wait whose token has all its sessions open.
SESSIONS_RETRY_S = 5.0


class ShareError(AparteError):
    """A token has as many sessions as it may have, or has used up its rate for a long time."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UsedUpError(LimitError):
    """A step came of a token that has used up its rate for a long time."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Meter:
    """Use of something that has a rate: it is paid off as time passes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._paid_at = -math.inf  # when everything used so far is paid for

    @property
    def wait_s(self) -> float:
        """Seconds until everything is paid for."""
        return max(0.0, self._paid_at - self._clock())

    def use(self, amount: float, rate: float | None) -> None:
        """Use ``amount``, where ``rate`` per second is allowed; None allows everything."""
        if rate is None:
            self._paid_at = -math.inf
        else:
            self._paid_at = max(self._paid_at, self._clock() - BURST_S) + amount / rate


class Allowances:
    """The use that is made of each token of ``keys``."""

    def __init__(self, keys: Keyring | None, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._keys = keys
        self._clock = clock
        self._connections: Counter[Owner] = Counter()
        self._meters: dict[Owner, tuple[Meter, Meter]] = {}  # of tokens and of bytes

    def limits_of(self, owner: Owner | None) -> TokenLimits:
        """As they are at the moment; the file of tokens may change."""
        return TokenLimits() if owner is None or self._keys is None else self._keys.limits_of(owner.name)

    def memory_of(self, name: str) -> int | None:
        """Bytes that the caches of the token called ``name`` may take."""
        return None if self._keys is None else self._keys.limits_of(name).kv_bytes

    def check_connection(self, owner: Owner) -> None:
        """Somebody comes with this token. Raises :class:`ShareError`.

        A device that lost its connection comes again before the loss is noticed, so there may be twice as
        many connections as sessions.
        """
        most = self.limits_of(owner).max_sessions
        if most is not None and self._connections[owner] >= 2 * most:
            raise self._too_many(most)
        if (wait_s := self.wait_s(owner)) > LONGEST_WAIT_S:
            raise ShareError(self._used_up(wait_s), wait_s)

    def check_session(self, owner: Owner | None, others: int) -> None:
        """A session begins or goes on beside ``others`` of the same token. Raises :class:`ShareError`."""
        most = self.limits_of(owner).max_sessions
        if most is not None and others >= most:
            raise self._too_many(most)

    def arrive(self, owner: Owner | None) -> None:
        """A connection is open."""
        if owner is not None:
            self._connections[owner] += 1

    def leave(self, owner: Owner | None) -> None:
        """It is closed."""
        if owner is not None:
            self._connections[owner] -= 1
            if self._connections[owner] <= 0:
                del self._connections[owner]

    def wait_s(self, owner: Owner | None) -> float:
        """Seconds until a step of this token may be computed."""
        limits = self.limits_of(owner)
        if owner is None or owner not in self._meters:
            return 0.0
        rates = (limits.tokens_per_second, limits.bytes_per_second)
        return max(
            meter.wait_s if rate is not None else 0.0
            for meter, rate in zip(self._meters[owner], rates, strict=True)
        )

    def check_step(self, owner: Owner | None) -> float:
        """Seconds that a step has to wait. Raises :class:`UsedUpError` if that is too long."""
        wait_s = self.wait_s(owner)
        if wait_s > LONGEST_WAIT_S:
            raise UsedUpError(self._used_up(wait_s), wait_s)
        return wait_s

    def use(self, owner: Owner | None, *, tokens: int = 0, num_bytes: int = 0) -> None:
        """Tokens are computed, or bytes transferred."""
        limits = self.limits_of(owner)
        if owner is None or limits == TokenLimits():
            return
        if owner not in self._meters:
            self._meters[owner] = (Meter(self._clock), Meter(self._clock))
        of_tokens, of_bytes = self._meters[owner]
        of_tokens.use(tokens, limits.tokens_per_second)
        of_bytes.use(num_bytes, limits.bytes_per_second)

    def forget_all_but(self, owners: Collection[Owner]) -> None:
        """Tokens were revoked."""
        self._meters = {owner: meters for owner, meters in self._meters.items() if owner in owners}

    @staticmethod
    def _too_many(most: int) -> ShareError:
        sessions = "one session" if most == 1 else f"{most} sessions"
        return ShareError(
            f"This token may have {sessions} at a time. End another one, or try again in "
            f"{SESSIONS_RETRY_S:.0f} s.",
            SESSIONS_RETRY_S,
        )

    @staticmethod
    def _used_up(wait_s: float) -> str:
        return (
            f"This token has used up what it may use per second, for {math.ceil(wait_s)} s to come. Try "
            "again then, or ask whoever runs the server for a higher limit."
        )
