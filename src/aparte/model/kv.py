"""How one layer's keys, or values, are kept: as they are, or in fewer bits.

A row is what one node stores in one head. Fewer bits are chosen per row, from that row alone, when it is
stored; every later step reads the same rounded numbers, whether the row came alone or among others. So the
text of a run with few bits does not depend on how it was speculated, as with any other number format.
"""

from __future__ import annotations

import torch

from aparte.config import KvName

#: Below any magnitude that matters; keeps a row of zeros from being divided by zero.
_TINY = 1e-30
#: By kind with a scale per row: the type that is stored, and its largest number.
_SCALED: dict[KvName, tuple[torch.dtype, float]] = {
    "float8": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
}


class Rows:
    """Rows as they come, in one buffer ``[1, H, rows, head_dim]`` that grows when it is told to."""

    #: The type that is stored; None is that of the rows.
    _dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return 0 if self._buffer is None else self._buffer.shape[2]

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
        self._buffer = _grown(self._buffer, like, self._dtype or like.dtype, like.shape[3], rows, used)

    def store(self, new: torch.Tensor, first: int) -> torch.Tensor:
        """Put ``new`` ``[1, H, n, head_dim]`` at row ``first``; return all rows up to its end."""
        assert self._buffer is not None  # the caller has grown it
        end = first + new.shape[2]
        self._buffer[:, :, first:end] = new
        return self._buffer[:, :, :end]

    def move(self, index: torch.Tensor, to: int) -> None:
        """Gather the rows of ``index`` to ``to, to + 1, ...``"""
        if self._buffer is not None:
            _move(self._buffer, index, to)


class HalfRows(Rows):
    """Rows rounded to float16."""

    _dtype = torch.float16

    def store(self, new: torch.Tensor, first: int) -> torch.Tensor:
        return super().store(new, first).to(new.dtype)


class ScaledRows(Rows):
    """Rows of 8 bits, each with a float32 scale."""

    def __init__(self, kind: KvName) -> None:
        super().__init__()
        self._dtype, self._largest = _SCALED[kind]
        self._scales: torch.Tensor | None = None  # [1, H, rows, 1]

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._scales is None else self._scales.nbytes)

    def grow(self, like: torch.Tensor, rows: int, used: int) -> None:
        super().grow(like, rows, used)
        self._scales = _grown(self._scales, like, torch.float32, 1, rows, used)

    def store(self, new: torch.Tensor, first: int) -> torch.Tensor:
        assert self._scales is not None
        # In float32, because half precision has no number as small as the scale of a tiny row.
        exact = new.float()
        scale = exact.abs().amax(dim=-1, keepdim=True).clamp_min_(_TINY) / self._largest
        scaled = exact / scale
        stored = super().store(scaled.round_() if self._dtype == torch.int8 else scaled, first)
        end = stored.shape[2]
        self._scales[:, :, first:end] = scale
        return stored.to(torch.float32).mul_(self._scales[:, :, :end]).to(new.dtype)

    def move(self, index: torch.Tensor, to: int) -> None:
        super().move(index, to)
        if self._scales is not None:
            _move(self._scales, index, to)


def make_rows(kind: KvName) -> Rows:
    """Empty rows of that kind."""
    if kind == "model":
        return Rows()
    return HalfRows() if kind == "float16" else ScaledRows(kind)


def _grown(
    buffer: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype, width: int, rows: int, used: int
) -> torch.Tensor:
    grown = torch.zeros(1, like.shape[1], rows, width, dtype=dtype, device=like.device)
    if buffer is not None:
        grown[:, :, :used] = buffer[:, :, :used]
    return grown


def _move(buffer: torch.Tensor, index: torch.Tensor, to: int) -> None:
    # index_select copies first, so that overlapping rows are safe. It doesn't know 8-bit floats: as bytes.
    raw = buffer.view(torch.uint8) if buffer.dtype == torch.float8_e4m3fn else buffer
    raw[:, :, to : to + len(index)] = raw.index_select(2, index)
