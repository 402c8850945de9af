"""Tokens: who may use the server, by name. Only their hashes are kept.

A token file has one line per token, its name and the SHA-256 of the token:

    alice sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

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
from pathlib import Path
from typing import NamedTuple

from aparte.errors import UserError

#: The name of a token that nobody gave one.
FIRST = "default"
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_LINE = re.compile(rf"({_NAME.pattern}) sha256:([0-9a-f]{{64}})")


class Owner(NamedTuple):
    """Whose token it was. A new token of the same name is another owner's."""

    name: str
    digest: bytes


class Keyring:
    """Names and hashes. Comparing takes the same time for every token, right or wrong."""

    def __init__(self, hashes: Mapping[str, bytes]) -> None:
        self._hashes = dict(hashes)

    @classmethod
    def of(cls, token: str) -> Keyring:
        """For a single token, which is called :data:`FIRST`."""
        return cls({FIRST: _hash(token)})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._hashes)

    @property
    def owners(self) -> frozenset[Owner]:
        """Everybody who has a token."""
        return frozenset(Owner(*item) for item in self._hashes.items())

    def owner_of(self, token: str) -> Owner | None:
        """Who comes with ``token``, None if it is no valid one."""
        given, owner = _hash(token), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(given, known):
                owner = Owner(name, known)  # and on to the end: how long it takes says nothing
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
        self._hashes = _read(path)

    @classmethod
    def create(cls, path: Path) -> tuple[KeyFile, str]:
        """A new file with one token, and that token: it is not kept, and cannot be shown again."""
        token = secrets.token_urlsafe(32)
        _write(path, {FIRST: _hash(token)}, new=True)
        return cls(path), token

    def refresh(self) -> bool:
        """Read the file again if it has changed. One that cannot be read lets nobody in who was not in."""
        state = _state(self._path)
        if state == self._seen:
            return False
        self._seen = state
        self._hashes = _read(self._path)
        return True

    def add(self, name: str) -> str:
        """A new token called ``name``. Raises :class:`UserError` if there is one already."""
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{name!r} is no name for a token. Use up to 64 letters, digits and the characters _ . @ -"
            )
        if name in self._hashes:
            raise UserError(f"There is a token called {name} already. Revoke it first, or use another name.")
        token = secrets.token_urlsafe(32)
        self._replace({**self._hashes, name: _hash(token)})
        return token

    def revoke(self, name: str) -> None:
        """Raises :class:`UserError` if there is no token of that name."""
        if name not in self._hashes:
            known = ", ".join(self._hashes) or "none"
            raise UserError(f"There is no token called {name} in {self._path}. There is: {known}.")
        self._replace({other: known for other, known in self._hashes.items() if other != name})

    def _replace(self, hashes: dict[str, bytes]) -> None:
        _write(self._path, hashes)
        self._hashes, self._seen = hashes, _state(self._path)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _state(path: Path) -> tuple[int, int, int] | None:
    """What tells one state of the file from another, None if there is none."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None


def _read(path: Path) -> dict[str, bytes]:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The tokens in {path} cannot be read ({error}).") from None
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise UserError(f"Others than you can use {path}. Close it to them with: chmod 600 {path}")
    hashes: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1] in hashes:
            raise UserError(
                f"Line {number} of {path} is not a name of its own and the hash of a token. "
                "Remove it, and make tokens with `aparte tokens add`."
            )
        hashes[match[1]] = bytes.fromhex(match[2])
    return hashes


def _write(path: Path, hashes: Mapping[str, bytes], *, new: bool = False) -> None:
    """Replace the file at once, so that nobody reads half of it."""
    text = "".join(f"{name} sha256:{known.hex()}\n" for name, known in hashes.items())
    part = path if new else path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        if not new:
            part.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).") from None
