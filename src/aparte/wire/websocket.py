"""The link over a WebSocket: binary messages, no compression, bearer token, TLS.

Compression is off because hidden states don't compress and the attempt costs time at every step.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from aparte.address import is_loopback
from aparte.config import LinkSettings
from aparte.errors import DoorError, FrameError, LinkError, MismatchError, UserError
from aparte.fingerprint import Fingerprint
from aparte.wire.frames import PROTOCOL_VERSION, ErrorFrame, Frame, Hello, Welcome, decode, encode
from aparte.wire.link import error_from

#: Nodes per message that a device accepts at most, whatever the cloud announces.
MAX_NODES = 4096


class WebSocketLink:
    """One session of a cloud at ``url`` (``ws://`` or ``wss://``)."""

    def __init__(
        self,
        url: str,
        fingerprint: Fingerprint,
        *,
        wire: str,
        width: int,
        token: str | None = None,
        ca_file: Path | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise UserError(
                f"{url!r} is not a cloud's address. It looks like ws://127.0.0.1:7600 or wss://host:port."
            )
        self.where = f"The cloud at {url}"
        self._url = url
        self._host = parts.hostname
        self._fingerprint = fingerprint
        self._wire = wire
        self._token = token
        self._settings = settings or LinkSettings()
        self._ssl = _client_context(ca_file) if parts.scheme == "wss" else None
        self._max_bytes = MAX_NODES * width * 4 + 65_536
        self._socket: ClientConnection | None = None
        self._max_nodes = MAX_NODES

    @property
    def max_nodes(self) -> int:
        return self._max_nodes

    def open(self) -> bool:
        if self._socket is not None and self._socket.protocol.state is State.OPEN:
            return True
        self.close()
        self._socket = self._connect()
        try:
            self._greet()
        except BaseException:
            self.close()
            raise
        return False

    def send(self, message: bytes) -> None:
        if self._socket is None:
            raise LinkError(f"{self.where} is not connected.")
        try:
            self._socket.send(message)
        except ConnectionClosed as error:
            raise self._gone(error) from error

    def receive(self) -> tuple[Frame, int]:
        if self._socket is None:
            raise LinkError(f"{self.where} is not connected.")
        try:
            message = self._socket.recv(timeout=self._settings.step_timeout_s, decode=False)
        except TimeoutError:
            raise LinkError(
                f"{self.where} did not answer within {self._settings.step_timeout_s:.0f} s. "
                "Is the machine overloaded, or the network down?"
            ) from None
        except ConnectionClosed as error:
            raise self._gone(error) from error
        frame = decode(message)
        if isinstance(frame, ErrorFrame):
            raise error_from(frame, self.where)
        return frame, len(message)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> ClientConnection:
        try:
            return connect(
                self._url,
                ssl=self._ssl,
                additional_headers={"Authorization": f"Bearer {self._token}"} if self._token else None,
                compression=None,
                max_size=self._max_bytes,
                open_timeout=self._settings.connect_timeout_s,
                close_timeout=1,
                proxy=None if is_loopback(self._host) else True,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403):
                raise DoorError(
                    f"{self.where} refused the token. Give the server's token with --token-file."
                ) from None
            if status == 503:
                raise LinkError(f"{self.where} is full. Try again later.") from None
            raise LinkError(
                f"{self.where} answered with HTTP status {status}; is it `aparte serve`?"
            ) from None
        except ssl.SSLError as error:
            raise DoorError(
                f"The TLS certificate of {self._url} could not be checked ({error.reason or error}). "
                "For a certificate of your own give it with --tls-ca."
            ) from None
        except (InvalidURI, InvalidHandshake) as error:
            raise LinkError(f"{self.where} does not speak this protocol ({error}).") from None
        except TimeoutError:
            raise LinkError(
                f"{self.where} did not answer within {self._settings.connect_timeout_s:.0f} s. "
                "Check the address and the firewall."
            ) from None
        except OSError as error:
            raise LinkError(
                f"{self.where} cannot be reached ({error.strerror or error}). "
                "Is `aparte serve` running there?"
            ) from None

    def _greet(self) -> None:
        """Exchange fingerprints. Nothing that depends on text is sent before both sides agree."""
        self.send(encode(Hello(self._fingerprint.to_json(), self._wire)))
        frame, _ = self.receive()
        if not isinstance(frame, Welcome):
            raise FrameError(f"{self.where} did not answer the greeting; is it the same version of aparte?")
        if frame.version != PROTOCOL_VERSION:
            raise MismatchError(
                f"{self.where} speaks protocol {frame.version}, this device {PROTOCOL_VERSION}. "
                "Install the same version of aparte on both."
            )
        self._fingerprint.check(Fingerprint.from_json(frame.fingerprint))
        self._max_nodes = min(frame.max_nodes, MAX_NODES)

    def _gone(self, error: ConnectionClosed) -> LinkError:
        reason = error.rcvd.reason if error.rcvd else ""
        return LinkError(f"{self.where} went away{f' ({reason})' if reason else ''}.")


def _client_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{ca_file} is not a readable PEM certificate ({error}).") from None
