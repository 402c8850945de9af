"""Compiled functions on the threads that PyTorch computes with.

Those threads wait for their next share of work without sleeping, for a while. Threads of any other kind,
woken between two products, would have to take the processors from them, and gain nothing. On Linux PyTorch
brings its own OpenMP library, whose one entry point a C compiler would call in the same way. Where there is
none (other systems, other builds) the calling thread does all.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

#: What files are mapped into this process, on Linux.
MAPS = Path("/proc/self/maps")


@functools.cache
def _callable(address: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


class Team:
    """Runs a compiled function, which finds its share of the work by :func:`number` and :func:`size`."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._library = library
        #: What :func:`number` and :func:`size` take; 0 where there is one thread only.
        self.number = self.size = 0
        if library is not None:
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
            self.number, self.size = (
                _address(library.omp_get_thread_num),
                _address(library.omp_get_num_threads),
            )

    def run(self, function: int, argument: int, threads: int) -> None:
        """Call the ``function`` at that address, which takes one, on so many threads, this one included."""
        if self._library is None or threads == 1:
            _callable(function)(argument)
        else:
            self._library.GOMP_parallel(function, argument, threads, 0)


@functools.cache
def team() -> Team:
    """That of this process."""
    path = _library()
    try:
        return Team(None if path is None else ctypes.CDLL(str(path)))
    except (AttributeError, OSError):
        return Team(None)


def _library() -> Path | None:
    """The OpenMP library that PyTorch uses, if it is GNU's and can be told from others in this process."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return None
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/libgomp") == 1}
    folder = Path(torch.__file__).parent
    own = [path for path in paths if path.is_relative_to(folder) or path.parent.name == "torch.libs"]
    found = own or list(paths)
    return found[0] if len(found) == 1 else None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_typing: Any, address: Any) -> Any:  # noqa: ARG001
    """An address ``int64`` as what ``numba.carray`` takes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def call(_typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The ``int32`` that the function without arguments at an address ``int64`` returns."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])

    return types.int32(types.int64), generate
