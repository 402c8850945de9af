"""TLS as a device does it: whom it trusts, and a socket that two threads may share.

A link has one thread that reads and another that writes, and OpenSSL forbids both at once on one
connection. Python lets go of its own lock around them, and not every version has another that keeps them
apart: a session ticket of TLS 1.3 that arrives while the first request goes out then ends in a request
that is never sent, or in memory that is broken. So here they take turns, and wait outside of them.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aparte.errors import UserError
from aparte.pin import PinnedContext

T = TypeVar("T")

#: It needs no descriptor of its own, unlike epoll; Windows has only the other.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


class TurnTakingSocket(ssl.SSLSocket):
    """A TLS socket that one thread may read from while another writes.

    For OpenSSL it never blocks once the handshake is over; who has to wait does so without keeping the
    other out. Timeouts, the end of the stream and ``sendall`` are as with any socket.
    """

    _turn: threading.Lock | None = None  # the handshake is the business of one thread
    _patience_s: float | None = None

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        self._patience_s = super().gettimeout()
        super().settimeout(0)
        self._turn = threading.Lock()

    def settimeout(self, value: float | None) -> None:
        if self._turn is None:
            super().settimeout(value)
        else:
            self._patience_s = value

    def gettimeout(self) -> float | None:
        return super().gettimeout() if self._turn is None else self._patience_s

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        receive = super().recv
        return self._in_turn(lambda: receive(buflen, flags), selectors.EVENT_READ)

    def send(self, data: Any, flags: int = 0) -> int:  # what `sendall` is made of
        send = super().send
        return self._in_turn(lambda: send(data, flags), selectors.EVENT_WRITE)

    def close(self) -> None:
        # Closing alone does not wake who waits for the socket to become readable.
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        super().close()

    def _in_turn(self, call: Callable[[], T], event: int) -> T:
        """``call`` as soon as OpenSSL can, while nobody else is in it. Raises :class:`TimeoutError`."""
        if self._turn is None:
            return call()
        patience_s = self._patience_s
        end = None if patience_s is None else time.monotonic() + patience_s
        while True:
            try:
                with self._turn:
                    return call()
            except ssl.SSLWantReadError:
                wanted = selectors.EVENT_READ
            except ssl.SSLWantWriteError:
                wanted = selectors.EVENT_WRITE
            except BlockingIOError:  # TLS is over, the connection is not
                wanted = event
            self._wait(wanted, end)

    def _wait(self, event: int, end: float | None) -> None:
        with _Selector() as selector:
            try:
                selector.register(self, event)
            except ValueError:
                raise OSError("The socket was closed.") from None
            if not selector.select(None if end is None else max(0.0, end - time.monotonic())):
                raise TimeoutError("timed out")


def client_context(ca_file: Path | None, pins: Sequence[str]) -> ssl.SSLContext:
    """How a device does TLS: with whoever has a pinned certificate, else one of an authority.

    Raises :class:`UserError` for a file that holds no certificates.
    """
    if pins:
        context: ssl.SSLContext = PinnedContext.of(pins)
    else:
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"{ca_file} is not a readable PEM certificate ({error}).") from None
    context.sslsocket_class = TurnTakingSocket
    return context
