"""A certificate of the server's own, made at its first run.

Devices know it by its pin, so it needs no authority, no name that fits and no date that is looked at. Key and
certificate are one file: there is no moment at which only half of the pair is there.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import stat
from pathlib import Path

from aparte.errors import UserError

FILE = "tls.pem"
_YEARS = 10


def own_certificate(folder: Path) -> tuple[Path, bool]:
    """The file in ``folder`` with the server's key and certificate, and whether it was made just now.

    Raises :class:`UserError` if it can be read by others, or cannot be made.
    """
    path = folder / FILE
    try:
        if path.exists():
            _check_mode(path)
            return path, False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = folder / f".{FILE}.{secrets.token_hex(4)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_new_pair())
                file.flush()
                os.fsync(file.fileno())
            os.link(part, path)  # fails if another server was first
        except FileExistsError:
            return path, False
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"The server's certificate cannot be kept in {folder} ({error.strerror or error}). Choose "
            "another folder with --state."
        ) from None
    return path, True


def _check_mode(path: Path) -> None:
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise UserError(
            f"Others than you can read the key in {path}. Close it to them with: chmod 600 {path}"
        )


def _new_pair() -> bytes:
    """A private key and its self-signed certificate, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise UserError(
            "A certificate is made with the package cryptography. Install it with `pip install "
            "'aparte[server]'`, or make one yourself, with openssl, for --tls-cert and --tls-key."
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "aparte")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    if (host := socket.gethostname()).isascii() and host:
        names.append(x509.DNSName(host))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)
