"""Giving memory back: while a part is loaded, and when a server has no use for it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim() -> None:
    """Return what was freed to the system, where the C library can.

    Converting a layer frees about as much as it keeps. What is freed lies between what is kept, and glibc
    holds on to it.
    """
    if (give_back := _malloc_trim()) is not None:
        give_back(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, or none of that kind
        return None
    return function
