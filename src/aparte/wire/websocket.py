"""The link over a WebSocket: binary messages, no compression, bearer token, TLS.

Compression is off because hidden states don't compress and the attempt costs time at every step.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException
from websockets.http11 import Response
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from aparte.address import is_loopback
from aparte.config import LinkSettings
from aparte.deadline import Deadline
from aparte.errors import (
    AparteError,
    DoorError,
    FrameError,
    LinkError,
    MismatchError,
    SilenceError,
    UserError,
)
from aparte.fingerprint import Fingerprint
from aparte.wire.frames import (
    MAX_HEADER_BYTES,
    MAX_NODES,
    PROTOCOL_VERSION,
    ErrorFrame,
    Frame,
    Hello,
    Welcome,
    decode,
    encode,
)
from aparte.wire.link import error_from, printable
from aparte.wire.record import Tape
from aparte.wire.ssh_address import SshAddress, is_ssh
from aparte.wire.tls import client_context
from aparte.wire.tunnel import tunnel_to

PING_INTERVAL_S = 20.0
#: How often the way to a cloud is measured before it is compared with others.
PINGS = 3


class WebSocketLink:
    """One session of a cloud at ``url`` (``ws://``, ``wss://`` or ``ssh://``), over as many connections as it
    takes. Through SSH there is TLS as well where a certificate to trust is given."""

    def __init__(
        self,
        url: str,
        fingerprint: Fingerprint,
        *,
        wire: str,
        width: int,
        token: str | None = None,
        ca_file: Path | None = None,
        pins: Sequence[str] = (),
        settings: LinkSettings | None = None,
        deadline: Deadline | None = None,
        manifest: Callable[[], str] | None = None,
        tape: Tape | None = None,
    ) -> None:
        """``deadline`` is the answer's; no wait for a step goes beyond it. ``tape`` keeps what is said.

        ``manifest`` works out what a shard's manifest has to be, empty if that can't be known here. It is
        asked if the cloud serves a shard.
        """
        self._behind = SshAddress.parse(url) if is_ssh(url) else None
        self._tunnel = tunnel_to(self._behind.account) if self._behind else None
        self._url = url
        if self._behind:
            self._url = f"{'wss' if ca_file or pins else 'ws'}://{self._behind.inner}"
        try:
            uri = parse_uri(self._url)
        except (InvalidURI, ValueError):
            raise UserError(
                f"{url!r} is not a cloud's address. It looks like ws://127.0.0.1:7600, wss://host:port or "
                "ssh://user@host/7600."
            ) from None
        if ca_file is not None and not uri.secure:
            raise UserError(f"--tls-ca is of no use with {url}, which is not encrypted. Use wss://.")
        if pins and not uri.secure:
            raise UserError(f"--pin is of no use with {url}, which is not encrypted. Use wss://.")
        if pins and ca_file is not None:
            raise UserError("--pin and --tls-ca are two ways to know a server. Give one of them.")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise UserError("The token holds characters that cannot be sent; use printable ASCII.")
        self.where = f"The cloud at {url}"
        self._host = uri.host
        self._fingerprint = fingerprint
        self._manifest = manifest
        self._wire = wire
        self._token = token
        self._settings = settings or LinkSettings()
        self._deadline = deadline or Deadline()
        self._tape = tape
        self._resume = ""  # the session's name, by which a new connection finds it
        self._ssl = client_context(ca_file, pins) if uri.secure else None
        self._max_bytes = MAX_NODES * width * 4 + MAX_HEADER_BYTES
        self._socket: ClientConnection | None = None
        self._max_nodes = MAX_NODES
        self.max_context = 0  # known once open
        #: What the cloud says it computes with; known once open.
        self.cloud_dtype = ""
        #: False if what is sent can be read on the way to another machine.
        self.is_protected = uri.secure or is_loopback(uri.host)

    @property
    def max_nodes(self) -> int:
        return self._max_nodes

    def open(self) -> bool:
        if self._socket is not None and self._socket.protocol.state is State.OPEN:
            return True
        self._drop()
        self._socket = self._connect()
        if self._tape:
            self._tape.opened()
        try:
            return self._greet()
        except LinkError as error:
            self._drop()
            # Without a greeting nobody is there who could be silent about a step.
            raise (LinkError(str(error)) if isinstance(error, SilenceError) else error) from None
        except BaseException:
            self.close()
            raise

    def measure(self) -> float:
        """Milliseconds of the fastest of a few pings over a connection of their own, without a greeting.

        Raises :class:`LinkError` or :class:`DoorError` if there is no way in.
        """
        connection = self._connect()
        try:
            times = []
            for _ in range(PINGS):
                started = time.perf_counter()
                if not connection.ping().wait(self._connect_s):
                    raise LinkError(f"{self.where} does not answer pings.")
                times.append((time.perf_counter() - started) * 1e3)
        except ConnectionClosed as error:
            raise self._gone(error) from error
        finally:
            connection.close()
        return min(times)

    def send(self, message: bytes) -> None:
        if self._socket is None:
            raise LinkError(f"{self.where} is not connected.")
        if self._tape:  # first: of a message that fails, nobody knows how much arrived
            self._tape.up(message)
        try:
            self._socket.send(message)
        except ConnectionClosed as error:
            raise self._last_word(self._socket) or self._gone(error) from error

    def receive(self) -> tuple[Frame, int]:
        left_s = self._deadline.left_s
        if left_s > self._settings.step_timeout_s:
            return self._receive(self._settings.step_timeout_s)
        try:
            return self._receive(max(0.0, left_s))
        except SilenceError:
            raise self._deadline.error() from None

    def _receive(self, timeout_s: float) -> tuple[Frame, int]:
        if self._socket is None:
            raise LinkError(f"{self.where} is not connected.")
        try:
            message = self._socket.recv(timeout=timeout_s, decode=False)
        except TimeoutError:
            self._drop()  # an answer that comes too late must not meet another question
            raise SilenceError(self.where, timeout_s) from None
        except ConnectionClosed as error:
            raise self._gone(error) from error
        if self._tape:
            self._tape.down(message)
        frame = decode(message)
        if isinstance(frame, ErrorFrame):
            self._drop()
            raise self._told(frame)
        return frame, len(message)

    def close(self) -> None:
        self._resume = ""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _drop(self) -> None:
        """End the connection without a word, so that the cloud keeps the session for a while."""
        if self._socket is not None:
            self._socket.close_socket()
            self._socket = None

    def _connect(self) -> ClientConnection:
        timeout_s = self._settings.step_timeout_s
        through: dict[str, Any] = {}
        if self._tunnel and self._behind:
            sock = self._tunnel.dial(self._behind.to, self._connect_s)
            through = {"sock": sock, "unix": True}
            if self._ssl:  # the certificate is for the machine's own name
                through["server_hostname"] = self._behind.account.host
        try:
            connection: ClientConnection = connect(
                self._url,
                ssl=self._ssl,
                additional_headers={"Authorization": f"Bearer {self._token}"} if self._token else None,
                compression=None,
                max_size=self._max_bytes,
                open_timeout=self._connect_s,
                ping_interval=min(PING_INTERVAL_S, timeout_s / 4),
                close_timeout=1,
                proxy=None if through or is_loopback(self._host) else True,
                **through,
            ).__enter__()  # closed by `close`; calling connect() without a context is deprecated
        except InvalidStatus as error:
            raise self._turned_away(error.response) from None
        except ssl.SSLCertVerificationError as error:
            raise DoorError(
                f"The TLS certificate of {self._url} could not be checked ({error.verify_message}). "
                "For a certificate of your own give it with --tls-ca, or the --pin that the server prints."
            ) from None
        except ssl.SSLError as error:
            raise DoorError(
                f"No TLS connection to {self._url} came about ({error.reason or error}). "
                "If the server has no certificate, its address begins with ws://."
            ) from None
        except TimeoutError:
            raise LinkError(
                f"{self.where} did not answer within {self._settings.connect_timeout_s:g} s. "
                "Check the address and the firewall."
            ) from None
        except OSError as error:
            raise LinkError(
                f"{self.where} cannot be reached ({error.strerror or error}). "
                "Is `aparte serve` running there?"
            ) from None
        except (WebSocketException, ImportError, AssertionError) as error:
            # ImportError: a SOCKS proxy without its package. AssertionError: websockets 17 fails one of
            # its own when a server speaks before it is spoken to, as SSH does.
            reason = printable(str(error)) or "it spoke first"
            raise LinkError(
                f"{self.where} does not speak this protocol ({reason}); is it `aparte serve`?"
            ) from None
        # A cloud that stops reading must not block a send for ever. Reads never wait that long on a live
        # connection, because pings are answered more often.
        with contextlib.suppress(OSError):  # closed already; the greeting will say so
            connection.socket.settimeout(timeout_s)
        return connection

    @property
    def _connect_s(self) -> float:
        """The longest wait for a connection, or for a greeting."""
        return max(0.001, min(self._settings.connect_timeout_s, self._deadline.left_s))

    def _turned_away(self, response: Response) -> DoorError | LinkError:
        status = response.status_code
        if status in (401, 403):
            return DoorError(f"{self.where} refused the token. Give the server's token with --token-file.")
        if status in (429, 503):
            told = printable(bytes(response.body or b"")[:300].decode(errors="replace").strip())
            full = LinkError(
                f"{self.where} is full. Try again later." if status == 503 else f"{self.where} says: {told}"
            )
            with contextlib.suppress(ValueError):
                asked = float(response.headers.get("Retry-After", "0"))
                full.retry_after_s = min(max(0.0, asked), self._settings.longest_wait_s)
            return full
        return LinkError(f"{self.where} answered with HTTP status {status}; is it `aparte serve`?")

    def _greet(self) -> bool:
        """Exchange fingerprints; whether the session that was there before goes on.

        Nothing that depends on text is sent before both sides agree.
        """
        resume = self._resume if self._settings.retries else None
        self.send(encode(Hello(self._fingerprint.to_json(), self._wire, resume=resume)))
        frame, _ = self._receive(self._connect_s)
        if not isinstance(frame, Welcome):
            raise FrameError(f"{self.where} did not answer the greeting; is it the same version of aparte?")
        if frame.version != PROTOCOL_VERSION:
            raise MismatchError(
                f"{self.where} speaks protocol {frame.version}, this device {PROTOCOL_VERSION}. "
                "Install the same version of aparte on both."
            )
        served = {key: printable(value) for key, value in frame.fingerprint.items()}
        theirs = Fingerprint.from_json(served)
        self._fingerprint.check(theirs)
        if theirs.manifest and self._manifest is not None:
            replace(self._fingerprint, manifest=self._manifest()).check(theirs)
        self._max_nodes = min(frame.max_nodes, MAX_NODES)
        self.max_context = frame.max_context
        self.cloud_dtype = printable(frame.dtype)
        resumed = frame.resumed and bool(resume)
        self._resume = frame.resume
        return resumed

    def _told(self, frame: ErrorFrame) -> AparteError:
        """What the cloud says, with no longer a wait than the settings allow."""
        error = error_from(frame, self.where)
        if isinstance(error, LinkError):
            error.retry_after_s = min(error.retry_after_s, self._settings.longest_wait_s)
        return error

    def _last_word(self, socket: ClientConnection) -> AparteError | None:
        """Why the cloud closed the connection, if it said so in an answer that nobody has read yet."""
        try:
            while True:
                frame = decode(socket.recv(timeout=0, decode=False))
                if isinstance(frame, ErrorFrame):
                    return self._told(frame)
        except (ConnectionClosed, TimeoutError, FrameError):
            return None

    def _gone(self, error: ConnectionClosed) -> LinkError:
        if isinstance(error.__cause__, TimeoutError):
            return LinkError(f"{self.where} took nothing for {self._settings.step_timeout_s:g} s.")
        reason = printable(error.rcvd.reason) if error.rcvd else ""
        return LinkError(f"{self.where} went away{f' ({reason})' if reason else ''}.")
