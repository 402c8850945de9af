"""Addresses of clouds behind an SSH server: ``ssh://[user@]host[:port]/[[to-host:]to-port]``."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from aparte.address import DEFAULT_PORT, LOOPBACK, format_address, parse_address
from aparte.errors import UserError

SCHEME = "ssh://"
_FORM = f"It looks like ssh://user@gpu.example:22/{DEFAULT_PORT}"


@dataclass(frozen=True)
class Account:
    """Whom to log in as, and where; None is what the SSH configuration says."""

    host: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        """As ``ssh`` takes it."""
        return (f"{self.user}@" if self.user else "") + self.host + (f" -p {self.port}" if self.port else "")


@dataclass(frozen=True)
class SshAddress:
    """A server as an SSH server sees it: behind ``account``, at ``to``."""

    account: Account
    to: tuple[str, int] = (LOOPBACK, DEFAULT_PORT)

    @classmethod
    def parse(cls, url: str) -> SshAddress:
        """Read an address. Raises :class:`UserError` for what is none."""
        try:
            parts = urlsplit(url)
        except ValueError:
            raise UserError(f"{url!r} is not a cloud's address. {_FORM}.") from None
        if parts.query or parts.fragment:
            raise UserError(f"{url!r} is not a cloud's address: nothing may follow the port. {_FORM}.")
        user, at, where = parts.netloc.rpartition("@")
        if ":" in user:
            raise UserError(
                "An ssh:// address must not hold a password: others see command lines. Log in with a key "
                "(ssh-copy-id puts it there), and leave the password out."
            )
        host, port = where, None
        try:
            if where.startswith("[") or ":" in where:
                host, port = parse_address(where if not where.endswith("]") else f"{where}:0", "")
            to = parts.path.strip("/")
            there = parse_address(to) if to else (LOOPBACK, DEFAULT_PORT)
        except UserError:
            raise UserError(f"{url!r} is not a cloud's address. {_FORM}.") from None
        names = (host, unquote(user), there[0])
        if (
            not host
            or (at and not user)
            or not there[1]
            or any(not name.isprintable() or " " in name or name.startswith("-") for name in names)
        ):
            raise UserError(f"{url!r} is not a cloud's address. {_FORM}.")
        return cls(Account(host, unquote(user) or None, port or None), there)

    @property
    def inner(self) -> str:
        """Host and port as the SSH server is asked for them."""
        return format_address(self.to)


def is_ssh(url: str) -> bool:
    return url.lower().startswith(SCHEME)
