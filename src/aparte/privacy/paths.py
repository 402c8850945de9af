"""Secret numbers that belong to a text: a key and all tokens up to a node decide them, and nothing else.

Slots and steps do not: a node that is sent again, in another step or after a lost connection, has the same
numbers, down to the last bit, and any other node has others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from aparte.step import ROOT, Step


class Paths:
    """One session's nodes, each with a digest of its path that nobody can foretell without the key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[int, tuple[bytes, int]] = {ROOT: (b"", -1)}  # slot -> digest of its path, position

    def follow(self, step: Step, tokens: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """A digest of the path to each node of ``step``, and the node's position."""
        for slot, parent, token in zip(step.slots, step.parents, tokens, strict=True):
            above, position = self._known[parent]
            digest = hashlib.blake2b(
                above + token.to_bytes(8, "little"), key=self._key, digest_size=32
            ).digest()
            self._known[slot] = digest, position + 1
        digests, positions = zip(*(self._known[slot] for slot in step.slots), strict=True)
        return list(digests), list(positions)


def gaussian(key: bytes, width: int) -> torch.Tensor:
    """``width`` standard normal numbers in float64, which nobody can foretell without ``key``.

    From SHAKE-256, by the inverse of the distribution function. A generator of torch would not do: it is
    seeded with 32 bits, which can be tried one by one.
    """
    words = np.frombuffer(hashlib.shake_256(b"noise" + key).digest(8 * width), dtype="<u8")
    # 52 bits and a half: never 0, never 1.
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    normal: torch.Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return normal
