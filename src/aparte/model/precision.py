"""What numbers a part computes with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from aparte.config import Compute, DtypeName, KvName
from aparte.errors import UserError
from aparte.model.fuse import fuse
from aparte.model.invariant import fix_rows
from aparte.model.linear import PACKED_WIDTH, Linears, pack_linears, packed_available

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

    @property
    def name(self) -> str:
        """The setting's name, as in ``--dtype``."""
        return str(self.dtype).removeprefix("torch.") if self.linears == "plain" else self.linears

    @property
    def default_wire(self) -> str:
        """The 16-bit number format to send this precision's activations in."""
        return "bfloat16" if self.dtype == torch.bfloat16 else "float16"

    def tensor_bytes(self, shape: tuple[int, ...], *, table: bool = False) -> int:
        """What a tensor of that shape takes here; the ``table`` of embeddings is not packed."""
        if self.linears == "plain" or len(shape) != 2:  # norms and biases, and experts, stay as they are
            return math.prod(shape) * self.dtype.itemsize
        rows, width = shape
        if table:
            return rows * width * 2
        padded = rows * -(-width // PACKED_WIDTH) * PACKED_WIDTH
        return padded + 4 * rows if self.linears == "int8" else padded * 2

    @classmethod
    def resolve(cls, compute: Compute) -> Precision:
        """Turn the user's settings into what this machine can do. Raises :class:`UserError`."""
        device = torch.device(_pick_device() if compute.device == "auto" else compute.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "There is no CUDA device here. Use --device cpu, or install a CUDA build of torch."
            )
        name: DtypeName = compute.dtype
        if name == "auto":
            name = _DEFAULTS.get(device.type, "packed16" if packed_available() else "float32")
        if name == "packed16" or name == "int8":
            if device.type != "cpu" or not packed_available():
                raise UserError(f"dtype {name} needs an x86 CPU with AVX2. Use --dtype float32.")
            return cls(torch.float32, name, device, compute.kv, compute.batch_invariant)
        return cls(getattr(torch, name), "plain", device, compute.kv, compute.batch_invariant)


def convert(module: nn.Module, precision: Precision, *, fused: bool = False) -> None:
    """Bring a module to the precision it computes in, in place; ``fused`` joins operations too."""
    if precision.linears == "plain":
        module.to(precision.device, precision.dtype)
    else:
        _convert_rest(module, precision.dtype)
    if fused:
        fuse(module, precision.linears)
    if precision.linears != "plain":
        pack_linears(module, precision.linears)
    if precision.invariant:
        fix_rows(module)


def _convert_rest(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert all but the linears, which are packed from what they are, so that no layer is here twice."""
    for child in module.modules():
        if type(child) is not nn.Linear:
            for name, weight in child.named_parameters(recurse=False):
                setattr(child, name, nn.Parameter(weight.to(dtype), requires_grad=False))
            for name, buffer in child.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(child, name, buffer.to(dtype))


def _pick_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
