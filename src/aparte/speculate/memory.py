"""What the *recycling* source learned, kept between runs if the user asks for it.

The file holds pairs of tokens from conversations, so it says something about them: it is only written on
request, only the user may read it, it never leaves the device, and ``aparte forget`` erases it.
"""

from __future__ import annotations

import contextlib
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from aparte.config import cache_dir
from aparte.distribution import Row
from aparte.errors import UserError
from aparte.speculate.recycling import KEPT, Recycling

#: Most keys kept per table; the oldest go first. About 5 MB per table.
MAX_KEYS = 100_000

Rows = dict[int, Row] | dict[tuple[int, int], Row]
Arrays = dict[str, npt.NDArray[Any]]


def memory_dir() -> Path:
    """Where the tables of all models lie."""
    return cache_dir() / "memory"


class Memory:
    """The table of one model. A damaged file, or one of another vocabulary, is as good as none."""

    def __init__(self, name: str, vocab_size: int) -> None:
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "model"
        self.path = memory_dir() / f"{slug}-{vocab_size}.safetensors"
        self._vocab_size = vocab_size

    def load(self) -> Recycling:
        """What is remembered; an empty table if there is nothing usable."""
        recycling = Recycling()
        try:
            arrays = load_file(self.path)
            recycling.after_one.update({int(key): row for (key,), row in self._rows(arrays, "one", width=1)})
            recycling.after_two.update(
                {(int(a), int(b)): row for (a, b), row in self._rows(arrays, "two", width=2)}
            )
        except (OSError, SafetensorError, KeyError, ValueError):
            return Recycling()
        return recycling

    def save(self, recycling: Recycling) -> None:
        """Replace the file at once or not at all; mode 0600 from the first byte."""
        arrays = _arrays(recycling.after_one, "one", 1) | _arrays(recycling.after_two, "two", 2)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(save(arrays))
            partial.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise UserError(
                f"What was learned cannot be kept in {self.path.parent}: {error.strerror or error}. "
                "Free some space, set APARTE_CACHE to another folder, or leave --remember out."
            ) from None

    def _rows(self, arrays: Arrays, name: str, width: int) -> list[tuple[list[int], Row]]:
        keys, tokens, shares = (arrays[f"{name}_{part}"] for part in ("keys", "tokens", "shares"))
        count = len(keys)
        if not (keys.dtype == tokens.dtype == np.int32 and shares.dtype == np.float16):
            raise ValueError("the tables are of other types")
        if keys.shape != (count, width) or tokens.shape != (count, KEPT) or shares.shape != (count, KEPT):
            raise ValueError("the tables do not fit together")
        if count and not (keys.min() >= -1 and max(keys.max(), tokens.max()) < self._vocab_size):
            raise ValueError("a token is not of this vocabulary")
        if count and not (tokens.min() >= 0 and (shares >= 0).all() and (shares <= 1).all()):
            raise ValueError("a share is no probability")
        return [
            (key, list(zip(row, part, strict=True)))
            for key, row, part in zip(keys.tolist(), tokens.tolist(), shares.tolist(), strict=True)
        ]


def erase() -> int:
    """Delete everything remembered, of every model; returns the number of files."""
    files = [path for path in memory_dir().glob("*") if path.is_file()] if memory_dir().is_dir() else []
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _arrays(rows: Rows, name: str, width: int) -> Arrays:
    rows = rows.copy()  # at once: an answer that is under way may still learn
    newest = list(islice(reversed(rows.items()), MAX_KEYS))[::-1]
    keys = np.array([key for key, _ in newest], dtype=np.int32).reshape(len(newest), width)
    pairs = np.array([row for _, row in newest], dtype=np.float64).reshape(len(newest), KEPT, 2)
    return {
        f"{name}_keys": keys,
        f"{name}_tokens": np.ascontiguousarray(pairs[:, :, 0].astype(np.int32)),
        f"{name}_shares": np.ascontiguousarray(pairs[:, :, 1].astype(np.float16)),
    }
