"""Linear layers for CPU speed.

``packed16`` keeps weights as half precision in FBGEMM's packed layout and computes in float32: half the
memory traffic of float32, which is what bounds a token step on a CPU, and no rounding of activations.

``bf16`` keeps weights in bfloat16 in the blocked layout that oneDNN multiplies, and computes in bfloat16 with
float32 sums. Processors that multiply tiles (AMX) take as long for sixteen rows as for one.

``int8`` keeps weights as 8-bit integers with a scale per output, a quarter of float32, and rounds what comes
in to 8 bits (7 where the processor's multiply-add saturates) with a scale per row. Sums of integers are
exact, so a row's result is the same to the bit alone and among others, whatever their number. Processors that
multiply tiles (AMX) do so by oneDNN, others by FBGEMM.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

#: How linears are kept: as they come, packed by FBGEMM or oneDNN, or quantised by ``bitsandbytes``.
Linears = Literal["plain", "packed16", "bf16", "int8", "bits8", "bits4"]
#: Those in this module.
PACKED: tuple[Linears, ...] = ("packed16", "bf16", "int8")

#: Most numbers that are packed at a time. A larger matrix, such as an LM head, is kept in blocks of rows.
BLOCK = 16 * 2**20

#: Rows that weights in bfloat16 are laid out for. One takes as long.
TILE = 16

#: Outputs from which on 8-bit weights are multiplied in tiles: for fewer, and one row, oneDNN is slow.
TILED = 512

#: The packed layout pads the inputs of a matrix to a multiple of this, which widths of large models are.
PACKED_WIDTH = 512
#: The same for 8-bit weights in tiles.
TILE_WIDTH = 64

#: The overloads themselves, so that they are not looked up by name at every call.
_LINEAR_16 = torch.ops.quantized.linear_dynamic_fp16.default
_LINEAR_8 = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
#: Below any magnitude that matters; keeps a row of zeros from being divided by zero.
_TINY = 1e-30


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with ``W`` packed in half precision; ``x`` and ``y`` are float32."""

    stored = "float16"
    #: What it multiplies.
    takes = torch.float32

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` may be of any number format; at most :data:`BLOCK` numbers are converted at a time."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.biased = bias is not None
        #: Outputs of each part that is packed.
        self.rows = rows = max(1, BLOCK // self.in_features)
        self._packed = [
            self._pack(
                weight.detach()[start : start + rows],
                None if bias is None else bias.detach()[start : start + rows].float(),
            )
            for start in range(0, self.out_features, rows)
        ]

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """The packer wants contiguous float32, and rounds to half precision itself."""
        return torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        results: list[torch.Tensor] = [_LINEAR_16(x, packed) for packed in self._packed]
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.stored}"


class Int8Linear(PackedLinear):
    """``y = x W^T + b`` with ``W`` and, while it is multiplied, ``x`` in 8-bit integers."""

    stored = "int8"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._tiles = weight.shape[0] >= TILED and tiles_available()
        super().__init__(weight, None)
        #: Outside of the integers, because a row's own scale multiplies the product and not the bias.
        self.bias = None if bias is None else bias.detach().float()
        #: Largest integer that a row is scaled to.
        self.levels = 127 if self._tiles else activation_levels()
        #: How :meth:`products` is given integers.
        self.reads = torch.int8 if self._tiles else torch.float32

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if self._tiles:
            return _tiled(*_integers(weight))
        weight = weight.float().contiguous()
        scales = weight.abs().amax(dim=1).clamp_min_(_TINY) / 127
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library announces that this interface will move one day
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            integers = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(integers, bias)

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """``integers W^T`` of rows of integers up to :attr:`levels`, in float32."""
        if len(self._packed) == 1:
            return self._multiplied(rows, self._packed[0])
        return torch.cat([self._multiplied(rows, packed) for packed in self._packed], dim=-1)

    def multiplier(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """:meth:`products` without calls between, for who asks thousands of times a second."""
        if len(self._packed) > 1 or not self._tiles:
            return self.products
        return functools.partial(_multiply_tiles, packed=self._packed[0])

    def _multiplied(self, rows: torch.Tensor, packed: Any) -> torch.Tensor:
        if self._tiles:
            return _multiply_tiles(rows, packed)
        result: torch.Tensor = _LINEAR_8(rows, 1.0, self.levels + 1, packed)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        scale = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).clamp_min_(_TINY)
        scale.mul_(1 / self.levels)
        scaled = x / scale
        product = self.products(scaled.round_().to(torch.int8) if self._tiles else scaled).mul_(scale)
        return product if self.bias is None else product.add_(self.bias)


class Bfloat16Linear(PackedLinear):
    """``y = x W^T + b`` with all of them in bfloat16, each output summed in float32."""

    stored = "bfloat16"
    takes = torch.bfloat16

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        # Looked up here, because builds of torch without oneDNN know no such name.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        super().__init__(weight, bias)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), TILE)
        return packed, None if bias is None else bias.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        results: list[torch.Tensor] = [
            self._multiply(x, packed, bias, "none", [], "") for packed, bias in self._packed
        ]
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


def _integers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` ``[out, in]`` as integers with a scale per row, never all of it in floats."""
    integers, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), 256):
        rows = slice(start, start + 256)
        part = weight[rows].float()
        scales[rows] = part.abs().amax(dim=1).clamp_min_(_TINY) / 127
        integers[rows] = part.div(scales[rows, None]).round_()
    return integers, scales


def _tiled(integers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Weights ``[out, in]`` in the layout that oneDNN multiplies, with a scale and a zero per output."""
    return (
        torch.ops.onednn.qlinear_prepack(integers, None),
        scales,
        torch.zeros(len(scales), dtype=torch.int64),
    )


def _multiply_tiles(rows: torch.Tensor, packed: tuple[torch.Tensor, ...]) -> torch.Tensor:
    result: torch.Tensor = _tiles_kernel()(rows, 1.0, 0, *packed, None, 1.0, 0, torch.float32, "none", [], "")
    return result


@functools.cache
def _tiles_kernel() -> Any:
    """Looked up once, and not when this is imported: builds of torch without oneDNN know no such name."""
    return torch.ops.onednn.qlinear_pointwise.default


@functools.cache
def tiles_available() -> bool:
    """True if this processor multiplies tiles of 8-bit integers (AMX), and oneDNN does so without an error.

    One row takes as long as sixteen then. The largest numbers are multiplied, among which a sum of 16 bits
    would overflow, and every product is an integer that float32 holds.
    """
    try:
        if not torch.cpu._is_amx_tile_supported():
            return False
        generator = torch.Generator().manual_seed(0)
        weight = torch.randint(-127, 128, (96, 256), generator=generator, dtype=torch.int8)
        rows = torch.randint(-127, 128, (17, 256), generator=generator, dtype=torch.int8)
        weight[0], rows[0] = 127, 127
        packed = _tiled(weight, torch.ones(96))
        exact = rows.double() @ weight.double().T
        return all(torch.equal(_multiply_tiles(rows[:n], packed).double(), exact[:n]) for n in (1, 2, 16, 17))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


@functools.cache
def activation_levels() -> int:
    """Largest magnitude of an activation as an integer here: 127, or 63 where pairs of products saturate.

    Processors without a multiply-add for 8 bits add two products in 16 bits, which the largest values
    overflow. Found by multiplying just those.
    """
    scales, zeros = torch.full((8,), 1 / 127, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    integers = torch.quantize_per_channel(torch.ones(8, 64), scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(integers, None)
    product = _LINEAR_8(torch.ones(1, 64), 1 / 127, 128, packed)
    return 127 if torch.allclose(product, torch.full_like(product, 64.0), rtol=1e-3) else 63


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None, linears: Linears) -> PackedLinear:
    """A packed linear of the kind ``linears``, one of :data:`PACKED`."""
    kinds: dict[Linears, type[PackedLinear]] = {"int8": Int8Linear, "bf16": Bfloat16Linear}
    return kinds.get(linears, PackedLinear)(weight, bias)


def packed_available() -> bool:
    """True if this build of torch has the packed kernels (x86 with AVX2)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        PackedLinear(torch.zeros(8, 8), None)(torch.zeros(1, 8))
        Int8Linear(torch.zeros(8, 8), None)(torch.zeros(1, 8))
    except RuntimeError:
        return False
    return True


@functools.cache
def bf16_available() -> bool:
    """True if this build of torch has oneDNN, and this processor its kernels for bfloat16 (x86, AVX-512)."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        Bfloat16Linear(torch.zeros(8, 8), None)(torch.zeros(1, 8, dtype=torch.bfloat16))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def pack_linears(module: nn.Module, linears: Linears = "packed16") -> None:
    """Replace every ``nn.Linear`` below ``module`` by a packed one, freeing the original as it goes."""
    replace_linears(module, lambda linear: packed_linear(linear.weight, linear.bias, linears))


def replace_linears(module: nn.Module, replacement: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace every ``nn.Linear`` below ``module``, one after the other."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, replacement(child))
        else:
            replace_linears(child, replacement)
