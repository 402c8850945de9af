"""Who may come in: the rules about addresses, tokens and certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from aparte.address import is_loopback
from aparte.errors import UserError
from aparte.pin import pin_of_certificate


def check(host: str, *, has_token: bool, has_tls: bool, insecure: bool) -> None:
    """Refuse to listen for other machines without a token and TLS, unless told to."""
    if is_loopback(host) or insecure or (has_token and has_tls):
        return
    missing = [name for name, given in (("--token-file", has_token), ("--tls-cert", has_tls)) if not given]
    raise UserError(
        f"{host} can be reached from other machines, and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} missing: anybody could use this server or read along. "
        "Give a token and a certificate, listen on 127.0.0.1 behind an SSH tunnel, or accept the risk "
        "with --insecure."
    )


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The server's TLS settings. Raises :class:`UserError` for files that don't work together."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UserError("TLS needs both --tls-cert and --tls-key.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password given, OpenSSL would ask for an encrypted key's on the terminal.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"{cert} and {key} are not a readable PEM certificate and its unencrypted private key ({error})."
        ) from None
    return context


def pin_of(cert: Path) -> str:
    """What devices can name the server's certificate by: ``sha256:`` and its digest."""
    pem = cert.read_text(encoding="ascii", errors="replace")
    start = pem.index(ssl.PEM_HEADER)
    end = pem.index(ssl.PEM_FOOTER, start) + len(ssl.PEM_FOOTER)
    return pin_of_certificate(ssl.PEM_cert_to_DER_cert(pem[start:end]))
