"""Linear layers for CPU speed.

``packed16`` keeps weights as half precision in FBGEMM's packed layout and computes in float32: half the
memory traffic of float32, which is what bounds a token step on a CPU, and no rounding of activations.
"""

from __future__ import annotations

import torch
from torch import nn

#: The overload itself, so that it is not looked up by name at every call.
_LINEAR = torch.ops.quantized.linear_dynamic_fp16.default


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with ``W`` packed in half precision; ``x`` and ``y`` are float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Contiguous float32 is what the packer wants; it rounds to half precision itself.
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.detach().float().contiguous(), None if bias is None else bias.detach().float()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        result: torch.Tensor = _LINEAR(x, self._packed)
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights=float16"


def packed_available() -> bool:
    """True if this build of torch has the packed kernels (x86 with AVX2)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        PackedLinear(torch.zeros(8, 8), None)(torch.zeros(1, 8))
    except RuntimeError:
        return False
    return True


def pack_linears(module: nn.Module) -> None:
    """Replace every ``nn.Linear`` below ``module`` by a packed one, freeing the original as it goes."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
