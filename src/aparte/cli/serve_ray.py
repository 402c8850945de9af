"""``aparte serve --ray``: replicas behind one address."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from aparte.cli.output import note, progress_bar
from aparte.cli.serve import announce
from aparte.cloud import door
from aparte.errors import UserError

if TYPE_CHECKING:
    from aparte.cloud.keys import Keyring
    from aparte.cloud.serving import Served


def serve_on_ray(
    served: Served,
    keys: Keyring | None,
    replicas: str,
    address: tuple[str, int, Path | None, Path | None],
    *,
    token: str | None,
    parent: int | None,
    json: bool,
) -> None:
    """Serve until a signal comes. ``address`` is host, port, certificate and key."""
    from aparte.cloud import replica
    from aparte.cloud.capacity import Replicas

    how_many = Replicas.parse(replicas)
    replica.require_ray()
    served = dataclasses.replace(served, message_bytes=replica.PROXY_MESSAGE_BYTES)
    with progress_bar(quiet=json) as progress:
        fingerprint = served.look(progress)
    host, port, cert, key = address
    port = _free_port(host, port)
    pin = None if cert is None else door.pin_of(cert)
    stop = threading.Event()
    try:
        least = replica.start(served, keys, how_many, replica.Address(host, port, cert, key))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        announce(fingerprint, host, port, pin, token, json=json, replicas=least)
        if not json:
            note(f"{replicas} replicas on Ray Serve; what they log is shown here.")
        while not stop.wait(1):
            if parent is not None and os.getppid() != parent:
                break
    finally:
        replica.stop()


def _free_port(host: str, port: int) -> int:
    """``port``, or a free one for 0. Raises :class:`UserError` if it is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host}:{port} ({error.strerror or error}). Choose another --port."
        ) from None
