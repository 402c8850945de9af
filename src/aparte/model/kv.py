"""How one layer's keys, or values, are kept: as they are, or in fewer bits.

A row is what one node stores in one head. Fewer bits are chosen per row, from that row alone, when it is
stored; every later step reads the same rounded numbers, whether the row came alone or among others. So the
text of a run with few bits does not depend on how it was speculated, as with any other number format.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aparte.config import KvName
from aparte.model.slab import Slab

#: Below any magnitude that matters; keeps a row of zeros from being divided by zero.
_TINY = 1e-30
#: By kind with a scale per row: the type that is stored, and its largest number.
_SCALED: dict[KvName, tuple[torch.dtype, float]] = {
    "float8": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
}


class Raw:
    """What is stored of one session on a CPU ``[H, rows, head_dim]``, and its scales ``[H, rows]`` if it has
    any, for whoever stores and reads there himself."""

    __slots__ = ("address", "rows", "scale_address", "scaled", "scales")

    def __init__(self, rows: npt.NDArray[Any], scales: npt.NDArray[Any]) -> None:
        self.rows, self.scales, self.scaled = rows, scales, scales.size > 0
        self.address, self.scale_address = rows.ctypes.data, scales.ctypes.data if self.scaled else 0


class Rows:
    """Rows as they come, in one buffer ``[1, H, rows, head_dim]`` that grows when it is told to.

    Buffers come from ``slab`` and go back to it.
    """

    #: The type that is stored; None is that of the rows.
    _dtype: torch.dtype | None = None

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._buffer: torch.Tensor | None = None
        #: Rows that there is room for.
        self.capacity = 0
        self._raw: Raw | None = None

    @property
    def raw(self) -> Raw | None:
        """What is stored, for :mod:`aparte.model.compiled`; None if that doesn't know it."""
        if self._raw is None and self._buffer is not None and self._dtype in (None, torch.int8):
            self._raw = Raw(self._buffer[0].numpy(), self._scale_array())
        return self._raw

    def _scale_array(self) -> npt.NDArray[Any]:
        return np.empty((0, 0), np.float32)

    @property
    def whole(self) -> torch.Tensor | None:
        """The buffer, if attention is given what lies in it; None if there is none."""
        return self._buffer if self._dtype is None else None

    @property
    def device(self) -> torch.device | None:
        """Where the rows lie; None while there are none."""
        return None if self._buffer is None else self._buffer.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def grow(self, like: torch.Tensor, rows: int, used: int) -> None:
        """Room for ``rows`` rows like those of ``like`` ``[1, H, n, head_dim]``, keeping ``used``."""
        self._buffer = self._grown(self._buffer, like, self._dtype or like.dtype, like.shape[3], rows, used)
        self.capacity = rows
        self._raw = None

    def store(self, new: torch.Tensor, first: int) -> torch.Tensor:
        """Put ``new`` ``[1, H, n, head_dim]`` at row ``first``; return all rows up to its end."""
        assert self._buffer is not None  # the caller has grown it
        end = first + new.shape[2]
        self._buffer[:, :, first:end] = new
        return self.read(end, new.dtype)

    def read(self, end: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """All rows up to ``end``, ``[1, H, end, head_dim]``, as numbers of that type."""
        assert self._buffer is not None
        return self._buffer[:, :, :end]

    def move(self, index: torch.Tensor, to: int) -> None:
        """Gather the rows of ``index`` to ``to, to + 1, ...``"""
        if self._buffer is not None:
            _move(self._buffer, index, to)

    def release(self) -> None:
        """Give everything back; there are no rows any more."""
        buffer, self._buffer, self._raw, self.capacity = self._buffer, None, None, 0
        if buffer is not None:
            self._slab.give(buffer)

    def _grown(
        self,
        buffer: torch.Tensor | None,
        like: torch.Tensor,
        dtype: torch.dtype,
        width: int,
        rows: int,
        used: int,
    ) -> torch.Tensor:
        grown = self._slab.take((1, like.shape[1], rows, width), dtype, like.device)
        if buffer is not None:
            grown[:, :, :used] = buffer[:, :, :used]
            self._slab.give(buffer)
        return grown


class HalfRows(Rows):
    """Rows rounded to float16."""

    _dtype = torch.float16

    def read(self, end: int, dtype: torch.dtype) -> torch.Tensor:
        return super().read(end, dtype).to(dtype)


class ScaledRows(Rows):
    """Rows of 8 bits, each with a float32 scale."""

    def __init__(self, slab: Slab, kind: KvName) -> None:
        super().__init__(slab)
        self._dtype, self._largest = _SCALED[kind]
        self._scales: torch.Tensor | None = None  # [1, H, rows, 1]

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._scales is None else self._scales.nbytes)

    def grow(self, like: torch.Tensor, rows: int, used: int) -> None:
        super().grow(like, rows, used)
        self._scales = self._grown(self._scales, like, torch.float32, 1, rows, used)
        self._raw = None

    def _scale_array(self) -> npt.NDArray[Any]:
        assert self._scales is not None
        return self._scales[0, :, :, 0].numpy()

    def store(self, new: torch.Tensor, first: int) -> torch.Tensor:
        assert self._scales is not None
        # In float32, because half precision has no number as small as the scale of a tiny row.
        exact = new.float()
        scale = exact.abs().amax(dim=-1, keepdim=True).clamp_min_(_TINY) / self._largest
        scaled = exact / scale
        assert self._buffer is not None
        end = first + new.shape[2]
        self._buffer[:, :, first:end] = scaled.round_() if self._dtype == torch.int8 else scaled
        self._scales[:, :, first:end] = scale
        return self.read(end, new.dtype)

    def read(self, end: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._scales is not None
        return super().read(end, dtype).to(torch.float32).mul_(self._scales[:, :, :end]).to(dtype)

    def move(self, index: torch.Tensor, to: int) -> None:
        super().move(index, to)
        if self._scales is not None:
            _move(self._scales, index, to)

    def release(self) -> None:
        super().release()
        scales, self._scales = self._scales, None
        if scales is not None:
            self._slab.give(scales)


def make_rows(kind: KvName, slab: Slab | None = None) -> Rows:
    """Empty rows of that kind, with memory from ``slab``, or else their own."""
    slab = slab or Slab(keep=False)
    if kind == "model":
        return Rows(slab)
    return HalfRows(slab) if kind == "float16" else ScaledRows(slab, kind)


def _move(buffer: torch.Tensor, index: torch.Tensor, to: int) -> None:
    # index_select copies first, so that overlapping rows are safe. It doesn't know 8-bit floats: as bytes.
    raw = buffer.view(torch.uint8) if buffer.dtype == torch.float8_e4m3fn else buffer
    raw[:, :, to : to + len(index)] = raw.index_select(2, index)
