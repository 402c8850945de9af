"""What numbers a part computes with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from aparte.config import NF4_BYTES, Compute, DtypeName, KvName
from aparte.errors import UserError
from aparte.model.bits import library, quantise_linears
from aparte.model.fuse import fuse
from aparte.model.invariant import fix_rows
from aparte.model.linear import (
    PACKED,
    PACKED_WIDTH,
    TILE_WIDTH,
    Linears,
    bf16_available,
    pack_linears,
    packed_available,
    tiles_available,
)

#: What ``auto`` means on a device; elsewhere it is packed16 or, where that is not to be had, float32.
_DEFAULTS: dict[str, DtypeName] = {"cuda": "bfloat16", "mps": "float16"}


@dataclass(frozen=True)
class Precision:
    """What numbers a part computes with: ``dtype`` of activations, and how linears are kept."""

    dtype: torch.dtype
    linears: Linears
    device: torch.device
    kv: KvName = "model"
    #: Nodes' results do not depend on the nodes beside them (:mod:`aparte.model.invariant`).
    invariant: bool = False
    #: Steps of few nodes are recorded (:mod:`aparte.model.windows`).
    graphs: bool = False

    @property
    def name(self) -> str:
        """The setting's name, as in ``--dtype``."""
        if self.linears in ("plain", "bf16"):
            return str(self.dtype).removeprefix("torch.")
        return {"bits8": "int8", "bits4": "nf4"}.get(self.linears, self.linears)

    @property
    def head(self) -> Linears:
        """How the LM head is kept: as the other linears are, but not in 4 bits."""
        if self.linears != "bits4":
            return self.linears
        return "packed16" if self.device.type == "cpu" and packed_available() else "plain"

    @property
    def table(self) -> torch.dtype:
        """How the embedding is kept: in 16 bits where linears are kept in other numbers than they compute."""
        return torch.float16 if self.linears != "plain" and self.dtype == torch.float32 else self.dtype

    @property
    def default_wire(self) -> str:
        """The 16-bit number format to send this precision's activations in."""
        return "bfloat16" if self.dtype == torch.bfloat16 else "float16"

    def tensor_bytes(self, shape: tuple[int, ...], *, table: bool = False, head: bool = False) -> int:
        """What a tensor of that shape takes here; the ``table`` of embeddings and the ``head`` have formats
        of their own."""
        if table:
            return math.prod(shape) * self.table.itemsize
        linears = self.head if head else self.linears
        if linears in ("plain", "bf16") or len(shape) != 2:  # norms and biases, and experts, stay as they are
            return math.prod(shape) * self.dtype.itemsize
        rows, width = shape
        if linears == "bits4":
            return round(rows * width * NF4_BYTES)
        if linears == "bits8":
            return rows * width + 4 * rows
        if linears == "int8" and tiles_available():  # and for each output a scale and a zero
            return rows * (-(-width // TILE_WIDTH) * TILE_WIDTH + 12)
        padded = rows * -(-width // PACKED_WIDTH) * PACKED_WIDTH
        return padded + 4 * rows if linears == "int8" else padded * 2

    @classmethod
    def resolve(cls, compute: Compute) -> Precision:
        """Turn the user's settings into what this machine can do. Raises :class:`UserError`."""
        device = torch.device(_pick_device() if compute.device == "auto" else compute.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "There is no CUDA device here. Use --device cpu, or install a CUDA build of torch."
            )
        if compute.graphs:
            _check_graphs(compute, device)
        name: DtypeName = compute.dtype
        if name == "auto":
            name = _DEFAULTS.get(device.type, "packed16" if packed_available() else "float32")
        more = (device, compute.kv, compute.batch_invariant, compute.graphs)
        if name == "nf4" or (name == "int8" and device.type == "cuda"):
            if device.type not in ("cpu", "cuda"):
                raise UserError(f"dtype nf4 needs a CPU or a CUDA device, and not {device.type}.")
            library()
            computes = torch.float32 if device.type == "cpu" else torch.bfloat16
            return cls(computes, "bits4" if name == "nf4" else "bits8", *more)
        if name == "packed16" or name == "int8":
            if device.type != "cpu" or not packed_available():
                raise UserError(f"dtype {name} needs an x86 CPU with AVX2. Use --dtype float32.")
            return cls(torch.float32, name, *more)
        packed = name == "bfloat16" and device.type == "cpu" and bf16_available()
        return cls(getattr(torch, name), "bf16" if packed else "plain", *more)


def convert(module: nn.Module, precision: Precision, *, fused: bool = False) -> None:
    """Bring a module to the precision it computes in, in place; ``fused`` joins operations too."""
    if precision.linears == "plain":
        module.to(precision.device, precision.dtype)
    else:
        _convert_rest(module, precision.dtype, precision.device)
    if fused:
        fuse(module, precision.linears)
    if precision.linears in PACKED:
        pack_linears(module, precision.linears)
    elif precision.linears != "plain":
        quantise_linears(module, precision.name, precision.device)
    if precision.invariant:
        fix_rows(module)


def _convert_rest(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Convert all but the linears, which are packed from what they are, so that no layer is here twice."""
    for child in module.modules():
        if type(child) is not nn.Linear:
            for name, weight in child.named_parameters(recurse=False):
                setattr(child, name, nn.Parameter(weight.to(device, dtype), requires_grad=False))
            for name, buffer in child.named_buffers(recurse=False):
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                setattr(child, name, buffer.to(device, kind))


def _check_graphs(compute: Compute, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"--graphs is for NVIDIA's GPUs, and this computes on {device.type}. Leave it out.")
    if compute.kv != "model":
        raise UserError("--graphs works with keys and values as they are computed. Leave it or --kv out.")
    if compute.batch_invariant:
        raise UserError("--graphs and --batch-invariant exclude each other. Leave one of them out.")


def _pick_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
