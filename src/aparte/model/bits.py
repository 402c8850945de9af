"""Linears in 8 and 4 bits by ``bitsandbytes``: for GPUs, and in 4 bits for a CPU that is short of memory.

``int8`` on a GPU is the same arithmetic as on a CPU (:mod:`aparte.model.linear`): integers with a scale per
output and per row that comes in. Sums of integers are exact, so a row's result does not depend on the rows
beside it. ``nf4`` keeps weights in the 4-bit format of QLoRA, 64 of them to a scale, and multiplies in the
format of what comes in.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import torch
from torch import nn

from aparte.config import NF4_GROUP
from aparte.errors import UserError
from aparte.model.linear import replace_linears

_TINY = 1e-30
_LEVELS = 127


@functools.cache
def library() -> Any:
    """``bitsandbytes``. Raises :class:`UserError` where it is not installed."""
    # On some CPUs it would fetch a compiled kernel from the hub with this package, and run it.
    there, log = sys.modules.get("kernels"), logging.getLogger("bitsandbytes")
    sys.modules["kernels"] = None  # type: ignore[assignment]
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that it did not
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError(
            "These numbers need the package bitsandbytes. Install it with: pip install 'aparte[bits]'"
        ) from error
    finally:
        log.setLevel(level)
        if there is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = there
    return bitsandbytes


class BitsLinear(nn.Module):
    """``y = x W^T + b`` with ``W`` quantised on ``device``; what comes in and goes out has one format."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> None:
        """``weight`` may be of any number format and anywhere."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.device = device
        self.biased = bias is not None
        self._library = library()
        self._bias = None if bias is None else bias.detach().to(device)


class GpuInt8Linear(BitsLinear):
    """8-bit integers on both sides, multiplied by the library."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(weight, bias, device)
        whole = weight.detach().to(device).float()
        self._scales = whole.abs().amax(dim=1).clamp_min_(_TINY) / _LEVELS
        self._weight = (whole / self._scales[:, None]).round_().to(torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        rows = x.reshape(-1, self.in_features).float()
        scales = rows.abs().amax(dim=-1, keepdim=True).clamp_min_(_TINY) / _LEVELS
        sums = self._library.functional.int8_linear_matmul(
            (rows / scales).round_().to(torch.int8), self._weight
        )
        result = sums.float().mul_(scales).mul_(self._scales)
        if self._bias is not None:
            result.add_(self._bias)
        output: torch.Tensor = result.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return output


class Nf4Linear(BitsLinear):
    """Weights in 4 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(weight, bias, device)
        self._weight, self._state = self._library.functional.quantize_4bit(
            weight.detach().to(device).contiguous(), blocksize=NF4_GROUP, quant_type="nf4"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        bias = None if self._bias is None else self._bias.to(x.dtype)
        result: torch.Tensor = self._library.matmul_4bit(x, self._weight, quant_state=self._state, bias=bias)
        return result.to(x.dtype)


def bits_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, name: str, device: torch.device
) -> BitsLinear:
    """A linear of the format ``name``, ``int8`` or ``nf4``."""
    return (GpuInt8Linear if name == "int8" else Nf4Linear)(weight, bias, device)


def quantise_linears(module: nn.Module, name: str, device: torch.device) -> None:
    """Replace every ``nn.Linear`` below ``module``, freeing the original as it goes."""
    replace_linears(module, lambda linear: bits_linear(linear.weight, linear.bias, name, device))
