"""Network addresses."""

from __future__ import annotations

import ipaddress

from aparte.errors import UserError

LOOPBACK = "127.0.0.1"
#: Where `aparte serve` listens.
DEFAULT_PORT = 7600


def is_loopback(host: str) -> bool:
    """True for addresses that never leave this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_address(text: str, default_host: str = LOOPBACK) -> tuple[str, int]:
    """Read ``PORT``, ``HOST:PORT`` or ``[IPV6]:PORT``."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UserError(f"{text!r} is not an address; give HOST:PORT, for example {LOOPBACK}:8765.")
    return host.removeprefix("[").removesuffix("]") or default_host, int(port)


def format_address(address: tuple[str, int]) -> str:
    """Write an address so that :func:`parse_address` reads it back."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
