"""Pins: a certificate named by its digest, for a server without an authority behind it.

The pin takes the place of authorities and host names: whoever holds the private key of that very
certificate is the right server, wherever it listens. It is checked right after the TLS handshake, before
anything is sent.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from aparte.errors import DoorError, UserError

_PIN = re.compile(r"sha256:([0-9a-f]{64})")


def pin_of_certificate(der: bytes) -> str:
    """``sha256:`` and the digest of a certificate in DER, in hexadecimal."""
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def parse_pin(text: str) -> str:
    """Read a pin, also as ``openssl x509 -fingerprint -sha256`` writes the digest."""
    kind, _, digest = text.strip().partition(":")
    pin = f"{kind.lower()}:{digest.replace(':', '').lower()}"
    if _PIN.fullmatch(pin) is None:
        raise UserError(
            f"{text!r} is not a pin. It is sha256: and 64 hexadecimal digits, as `aparte serve` prints it."
        )
    return pin


class PinnedContext(ssl.SSLContext):
    """TLS with whoever holds one of the pinned certificates, and with nobody else."""

    _pins: tuple[str, ...] = ()

    @classmethod
    def of(cls, pins: Sequence[str]) -> PinnedContext:
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context._pins = tuple(map(parse_pin, pins))
        return context

    def wrap_socket(self, sock: socket.socket, *args: Any, **settings: Any) -> ssl.SSLSocket:
        """Raises :class:`DoorError` after the handshake if the certificate is another one."""
        wrapped = super().wrap_socket(sock, *args, **settings)
        shown = pin_of_certificate(wrapped.getpeercert(binary_form=True) or b"")
        if not any(hmac.compare_digest(shown, pin) for pin in self._pins):
            wrapped.close()
            raise DoorError(
                f"The server shows another certificate than the pinned one: {shown}. If it was replaced, "
                "take the new pin from the server itself, not from here; if not, somebody is in between."
            )
        return wrapped
