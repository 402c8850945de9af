"""Hidden states as raw little-endian bytes, in the number format agreed on in the hello."""

from __future__ import annotations

import sys

import torch

from aparte.errors import FrameError, UserError, WireOverflowError

WIRE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported by torch wheels
    raise ImportError("aparte's wire format is little-endian; big-endian machines are not supported.")


class TensorCodec:
    """Turns ``[n, D]`` tensors into bytes and back."""

    def __init__(self, wire: str, width: int) -> None:
        if wire not in WIRE_DTYPES:
            raise UserError(f"Unknown wire format {wire!r}. Known: {', '.join(WIRE_DTYPES)}.")
        self.wire = wire
        self.width = width
        self._dtype = WIRE_DTYPES[wire]

    @property
    def bytes_per_node(self) -> int:
        """What one node's hidden state costs, one way."""
        return self.width * self._dtype.itemsize

    def encode(self, hidden: torch.Tensor) -> memoryview:
        """Raises :class:`WireOverflowError` if a value does not fit, rather than send an infinity."""
        wire = hidden.to(self._dtype)
        if not bool(torch.isfinite(wire).all()):
            if bool(torch.isfinite(hidden).all()):
                raise WireOverflowError(
                    f"An activation is too large for {self.wire} on the wire (its largest number is "
                    f"{torch.finfo(self._dtype).max:.0f}). Use --wire bfloat16 or --wire float32."
                )
            raise WireOverflowError(
                "An activation is not a finite number. With --dtype float16 use bfloat16 or float32; "
                "otherwise the checkpoint or the other side is damaged."
            )
        return wire.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")

    def check_size(self, payload: bytes | memoryview, nodes: int) -> None:
        """Raise :class:`FrameError` unless ``payload`` has exactly the size of ``nodes`` hidden states."""
        if len(payload) != nodes * self.bytes_per_node:
            raise FrameError(
                f"A message for {nodes} nodes should carry {nodes * self.bytes_per_node} bytes "
                f"and carries {len(payload)}."
            )

    def decode(self, payload: bytes | memoryview, nodes: int) -> torch.Tensor:
        """``[nodes, D]`` in the wire's dtype. Raises :class:`FrameError` if the size is not exact."""
        self.check_size(payload, nodes)
        hidden = torch.frombuffer(bytearray(payload), dtype=self._dtype).view(nodes, self.width)
        if not bool(torch.isfinite(hidden).all()):
            raise FrameError("A message holds numbers that are not finite.")
        return hidden
