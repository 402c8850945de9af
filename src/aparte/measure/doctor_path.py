"""The layers below the protocol, with their times: TCP, SSH, TLS, WebSocket, and a server's health page."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aparte.address import is_loopback
from aparte.config import LinkSettings
from aparte.errors import LinkError
from aparte.fingerprint import Fingerprint
from aparte.wire.ssh_address import SshAddress, is_ssh
from aparte.wire.tls import client_context
from aparte.wire.tunnel import Tunnel, tunnel_to
from aparte.wire.websocket import WebSocketLink


@dataclass(frozen=True)
class Door:
    """How to get in."""

    url: str
    token: str | None = None
    ca_file: Path | None = None
    settings: LinkSettings = field(default_factory=LinkSettings)
    pins: tuple[str, ...] = ()
    #: Of an emulated path the round trip to whoever takes the connection, which an emulator cannot delay.
    near_ms: float = 0.0

    @property
    def behind(self) -> SshAddress | None:
        """The address behind an SSH server, if the way leads through one."""
        return SshAddress.parse(self.url) if is_ssh(self.url) else None

    @property
    def tunnel(self) -> Tunnel | None:
        return tunnel_to(self.behind.account) if self.behind else None

    @property
    def host(self) -> str:
        """Of the machine, as its certificate has it."""
        return self.behind.account.host if self.behind else urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "wss" else 80)

    @property
    def is_tls(self) -> bool:
        if self.behind:
            return bool(self.ca_file or self.pins)
        return urlsplit(self.url).scheme == "wss"

    @property
    def is_encrypted(self) -> bool:
        """False if what is sent can be read on the way to another machine."""
        return self.is_tls or is_loopback(self.behind.to[0] if self.behind else self.host)

    def dial(self) -> socket.socket:
        """A fresh connection to the server; it takes as long on an emulated path as on a real one."""
        timeout_s = self.settings.connect_timeout_s
        if self.behind and self.tunnel:
            return self.tunnel.dial(self.behind.to, timeout_s)
        connection = socket.create_connection((self.host, self.port), timeout_s)
        time.sleep(self.near_ms / 1e3)
        return connection


class Ping(WebSocketLink):
    """A connection that is pinged and says nothing of a model."""

    def __init__(self, door: Door) -> None:
        super().__init__(
            door.url,
            Fingerprint("", "", "", ""),
            wire="float16",
            width=1,
            token=door.token,
            ca_file=door.ca_file,
            pins=door.pins,
            settings=door.settings,
        )

    def _greet(self) -> bool:
        """Nothing: the cloud waits some seconds for a greeting before it hangs up."""
        return False

    def times_ms(self, count: int) -> list[float]:
        """Round trips of WebSocket pings. Raises :class:`LinkError` if the cloud goes away."""
        assert self._socket is not None
        times = []
        for _ in range(count):
            started = time.perf_counter()
            try:
                answered = self._socket.ping().wait(self._settings.connect_timeout_s)
            except Exception as error:
                raise LinkError(f"{self.where} went away while it was pinged.") from error
            if not answered:
                raise LinkError(f"{self.where} answers no pings. Is it `aparte serve`?")
            times.append((time.perf_counter() - started) * 1e3)
        return times


def connect_ms(door: Door) -> float | None:
    """A TCP connect to whoever takes connections there: the server, or the SSH server in front of it. None
    if that one is reached by way of others."""
    to = door.tunnel.peer if door.tunnel else (door.host, door.port)
    if to is None:
        return None
    started = time.perf_counter()
    with socket.create_connection(to, door.settings.connect_timeout_s):
        time.sleep(door.near_ms / 1e3)
        return (time.perf_counter() - started) * 1e3


def ssh_ms(door: Door) -> float | None:
    """Setting up the SSH connection, logging in included."""
    if not (door.behind and door.tunnel):
        return None
    door.tunnel.close()
    door.tunnel.dial(door.behind.to, door.settings.connect_timeout_s).close()
    return door.tunnel.setup_s * 1e3


def tls_ms(door: Door) -> float:
    """The TLS handshake alone."""
    with _secured(door) as (_, took_ms):
        return took_ms


@contextlib.contextmanager
def _secured(door: Door) -> Iterator[tuple[socket.socket, float]]:
    """A fresh connection, with TLS where the address says so, and how long its handshake took."""
    with door.dial() as plain:
        if not door.is_tls:
            yield plain, 0.0
            return
        context = client_context(door.ca_file, door.pins)
        started = time.perf_counter()
        with context.wrap_socket(plain, server_hostname=door.host) as secured:
            yield secured, (time.perf_counter() - started) * 1e3


def get(door: Door, path: str, token: str | None = None) -> tuple[int, bytes, float]:
    """An HTTP request: the status (0 for no HTTP at all), at most 64 KiB of the answer, and the time from
    the request to its first byte. Raises :class:`OSError`."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {door.host}:{door.port}", "Connection: close"]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    with _secured(door) as (connection, _):
        started = time.perf_counter()
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = connection.recv(1)
        took_ms = (time.perf_counter() - started) * 1e3
        while len(answer) < 1 << 16 and (piece := connection.recv(4096)):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n")[0].split()
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, body, took_ms


def first_byte(door: Door) -> tuple[float, dict[str, Any]]:
    """``GET /health``: time from the request to the first byte of the answer, and the answer."""
    status, body, took_ms = get(door, "/health")
    data = json.loads(body) if status == 200 else {}
    numbers = (int, float, bool)
    # A cloud's words are not repeated here: only states, counts and sizes.
    return took_ms, {
        str(key)[:40]: value
        for key, value in (data.items() if isinstance(data, dict) else ())
        if isinstance(value, numbers) or value in ("ok", "ready", "loading")
    }
