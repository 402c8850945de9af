"""Layers between whose linears everything is compiled, where Numba is installed (``aparte[fast]``).

This module itself needs no Numba; the others do.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from torch import nn

log = logging.getLogger("aparte.model")


@functools.cache
def available() -> bool:
    """Whether Numba is there, and can be used: it refuses versions of NumPy that it doesn't know yet."""
    if find_spec("numba") is None:
        return False
    try:
        import aparte.model.compiled.layer  # noqa: F401
    except Exception as error:
        _tell(error)
        return False
    return True


def pending() -> bool:
    """Whether compiling is still to come in this process: the first layers may have to wait for it."""
    return find_spec("numba") is not None and "aparte.model.compiled.layer" not in sys.modules


def compiled_layers(layers: Sequence[nn.Module], rotary: nn.Module) -> list[nn.Module]:
    """``layers`` compiled, if all of them can be; else as they are, which is slower and nothing else."""
    from aparte.model.compiled.layer import replaced

    try:
        return replaced(layers, rotary)
    except Exception as error:
        _tell(error)
        return list(layers)


def _tell(error: Exception) -> None:
    log.warning("Layers are not compiled, because Numba does not work here (%s).", type(error).__name__)
