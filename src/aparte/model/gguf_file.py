"""What a GGUF file says and where its tensors are, checked against the size of the file.

The ``gguf`` package has a reader too. It takes four seconds for a vocabulary of 49,152 tokens, which is
most of a conversion, and trusts every length in the file; this one takes a tenth of a second and
compares each length with the bytes that are left before it reads on.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aparte.errors import CheckpointError

if TYPE_CHECKING:
    import numpy
    import torch
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
#: GGUF's numbers for scalar types, as struct formats.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor; ``shape`` is in PyTorch's order, slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    raw: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]

    def load(self) -> torch.Tensor:
        """Its values: float16 and bfloat16 as they are, everything else as float32."""
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

        plain = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}
        if dtype := plain.get(self.kind):
            return torch.from_numpy(self.raw.copy()).view(dtype).reshape(self.shape)
        if self.kind is GGMLQuantizationType.F32:
            return torch.from_numpy(self.raw.copy()).view(torch.float32).reshape(self.shape)
        rows = self.raw.reshape(quant_shape_to_byte_shape(self.shape, self.kind))
        values = dequantize(rows, self.kind).astype(np.float32, copy=False)
        return torch.from_numpy(np.ascontiguousarray(values)).reshape(self.shape)

    def part(self, index: int) -> GgufTensor:
        """One of the tensors that this one is stacked from, along its first dimension."""
        size = len(self.raw) // self.shape[0]
        return replace(self, shape=self.shape[1:], raw=self.raw[index * size : (index + 1) * size])


class GgufFile:
    """Metadata and tensors of a GGUF file. Tensor bytes stay on disk until they are loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse(_Cursor(data))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror or error}. Check that it is a file you may read."
            ) from error
        except (struct.error, ValueError, OverflowError) as error:
            raise self.damaged(str(error)) from error

    def need(self, key: str) -> Any:
        """The value of a metadata key that the file cannot do without."""
        if key not in self.metadata:
            raise self.damaged(f"it does not say {key}")
        return self.metadata[key]

    def damaged(self, cause: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a usable GGUF file: {cause}. Download or copy it again.")

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = cursor.unpack("I")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}, and versions 2 and 3 are supported")
        num_tensors, num_keys = cursor.unpack("QQ")
        for _ in range(num_keys):
            key = cursor.string()
            (kind,) = cursor.unpack("I")
            self.metadata[key] = cursor.value(kind)
        table = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        for name, shape, kind, offset in table:
            if name in self.tensors:
                raise ValueError(f"tensor {name} occurs twice")
            self.tensors[name] = _place(cursor, name, shape, kind, start + offset)

    @staticmethod
    def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        (dimensions,) = cursor.unpack("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed(cursor.unpack(f"{dimensions}Q")))
        kind, offset = cursor.unpack("IQ")
        return name, shape, kind, offset


class _Cursor:
    """Reads little-endian values one after another and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.position)
        self.position += struct.calcsize("<" + form)
        return values

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise ValueError(f"it ends early, after {len(self.data):,} bytes")
        self.position += size
        return self.data[self.position - size : self.position]

    def string(self) -> str:
        (size,) = self.unpack("Q")
        return self.take(size).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"it holds a value of the unknown type {kind}")
        item, count = self.unpack("IQ")
        # Every string costs eight bytes at least, so this bounds the loop by the size of the file.
        if (
            count * (struct.calcsize(_SCALARS[item]) if item in _SCALARS else 8)
            > len(self.data) - self.position
        ):
            raise ValueError(f"it holds a list of {count} values, more than fit in the file")
        if item in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item]}"))
        if item != _STRING:
            raise ValueError(f"it holds a list of the unknown type {item}")
        return [self.string() for _ in range(count)]


def _place(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    quantization = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor {name} does not consist of whole {quantization.name} blocks")
    num_bytes = math.prod(shape) // block * block_bytes
    if begin + num_bytes > len(cursor.data):
        raise ValueError(
            f"tensor {name} ends at byte {begin + num_bytes:,} and the file at {len(cursor.data):,}, "
            "so a download or copy was cut short"
        )
    raw = np.frombuffer(cursor.data, np.uint8, num_bytes, begin)
    return GgufTensor(name, shape, quantization, raw)
