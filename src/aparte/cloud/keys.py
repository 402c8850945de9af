"""Tokens: who may use the server, by name. Only their hashes are kept.

A token file has one line per token: its name, the SHA-256 of the token, and its limits if it has any:

    alice sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    bob sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752 sessions=2 tokens/s=50

The tokens are 256 random bits, made here, so that nobody finds one by trying, and a plain hash is enough.
Deleting a line revokes a token; the server looks at the file every second.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from aparte.config import TokenLimits
from aparte.errors import UserError

#: The name of a token that nobody gave one.
FIRST = "default"
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_LINE = re.compile(rf"({_NAME.pattern}) sha256:([0-9a-f]{{64}})((?: [a-z/]+=[0-9.e+]+)*)")
#: What limits are called in the file.
_LIMITS = {
    "sessions": "max_sessions",
    "tokens/s": "tokens_per_second",
    "bytes/s": "bytes_per_second",
    "memory": "kv_bytes",
}
_WHOLE_NUMBERS = ("max_sessions", "kv_bytes")


class Owner(NamedTuple):
    """Whose token it was. A new token of the same name is another owner's."""

    name: str
    digest: bytes


@dataclass(frozen=True)
class Key:
    """What is kept of a token."""

    digest: bytes
    limits: TokenLimits = field(default_factory=TokenLimits)


class Keyring:
    """Names and hashes. Comparing takes the same time for every token, right or wrong."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._keys = dict(keys)

    @classmethod
    def of(cls, token: str) -> Keyring:
        """For a single token, which is called :data:`FIRST`."""
        return cls({FIRST: Key(_hash(token))})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._keys)

    @property
    def owners(self) -> frozenset[Owner]:
        """Everybody who has a token."""
        return frozenset(Owner(name, key.digest) for name, key in self._keys.items())

    def limits_of(self, name: str) -> TokenLimits:
        """What the holder of the token called ``name`` may have; no limits if there is none."""
        key = self._keys.get(name)
        return TokenLimits() if key is None else key.limits

    def owner_of(self, token: str) -> Owner | None:
        """Who comes with ``token``, None if it is no valid one."""
        given, owner = _hash(token), None
        for name, key in self._keys.items():
            if hmac.compare_digest(given, key.digest):
                owner = Owner(name, key.digest)  # and on to the end: how long it takes says nothing
        return owner

    def refresh(self) -> bool:
        """Whether something may have changed."""
        return False


class KeyFile(Keyring):
    """The tokens in a file, which may change at any time."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`UserError` for a file that is missing, damaged or not the owner's alone."""
        super().__init__({})
        self._path = path
        self._seen = _state(path)
        self._keys = _read(path)

    @classmethod
    def create(cls, path: Path) -> tuple[KeyFile, str]:
        """A new file with one token, and that token: it is not kept, and cannot be shown again."""
        token = secrets.token_urlsafe(32)
        _write(path, {FIRST: Key(_hash(token))}, new=True)
        return cls(path), token

    def refresh(self) -> bool:
        """Read the file again if it has changed. One that cannot be read lets nobody in who was not in."""
        state = _state(self._path)
        if state == self._seen:
            return False
        self._seen = state
        self._keys = _read(self._path)
        return True

    def add(self, name: str, limits: TokenLimits | None = None) -> str:
        """A new token called ``name``. Raises :class:`UserError` if there is one already."""
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{name!r} is no name for a token. Use up to 64 letters, digits and the characters _ . @ -"
            )
        if name in self._keys:
            raise UserError(f"There is a token called {name} already. Revoke it first, or use another name.")
        token = secrets.token_urlsafe(32)
        self._replace({**self._keys, name: Key(_hash(token), limits or TokenLimits())})
        return token

    def limit(self, name: str, limits: TokenLimits) -> None:
        """Give the token called ``name`` these limits in place of those that it had."""
        self._check(name)
        self._replace({**self._keys, name: Key(self._keys[name].digest, limits)})

    def revoke(self, name: str) -> None:
        """Raises :class:`UserError` if there is no token of that name."""
        self._check(name)
        self._replace({other: key for other, key in self._keys.items() if other != name})

    def _check(self, name: str) -> None:
        if name not in self._keys:
            known = ", ".join(self._keys) or "none"
            raise UserError(f"There is no token called {name} in {self._path}. There is: {known}.")

    def _replace(self, keys: dict[str, Key]) -> None:
        _write(self._path, keys)
        self._keys, self._seen = keys, _state(self._path)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _state(path: Path) -> tuple[int, int, int] | None:
    """What tells one state of the file from another, None if there is none."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None


def limits_text(limits: TokenLimits) -> str:
    """Limits as a token file has them: ``sessions=2 tokens/s=50``; empty if there are none."""
    given = {word: getattr(limits, field) for word, field in _LIMITS.items()}
    return " ".join(f"{word}={value:.15g}" for word, value in given.items() if value is not None)


def _limits_of(text: str) -> TokenLimits:
    """Raises :class:`ValueError`, or :class:`UserError` for a limit that is none."""
    values: dict[str, float] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        field = _LIMITS.get(name)
        if field is None or field in values:
            raise ValueError(name)
        values[field] = int(float(value)) if field in _WHOLE_NUMBERS else float(value)
    return TokenLimits(**values)  # type: ignore[arg-type]


def _read(path: Path) -> dict[str, Key]:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The tokens in {path} cannot be read ({error}).") from None
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise UserError(f"Others than you can use {path}. Close it to them with: chmod 600 {path}")
    keys: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        try:
            if match is None or match[1] in keys:
                raise ValueError
            keys[match[1]] = Key(bytes.fromhex(match[2]), _limits_of(match[3]))
        except (ValueError, OverflowError, UserError):
            raise UserError(
                f"Line {number} of {path} is not a name of its own, the hash of a token and limits that "
                f"there are ({', '.join(_LIMITS)}). Remove it, and make tokens with `aparte tokens add`."
            ) from None
    return keys


def _write(path: Path, keys: Mapping[str, Key], *, new: bool = False) -> None:
    """Replace the file at once, so that nobody reads half of it."""
    lines = [f"{name} sha256:{key.digest.hex()} {limits_text(key.limits)}" for name, key in keys.items()]
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    part = path if new else path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        if not new:
            part.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).") from None
