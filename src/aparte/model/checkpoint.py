"""A model folder in the Hugging Face layout, of which only the tensors asked for are read.

``config.json`` plus ``model.safetensors``, or shards with ``model.safetensors.index.json``. Headers say
what is where; weights are memory mapped, so a part of the model costs the bytes of that part and no
more. :attr:`Checkpoint.bytes_read` and :attr:`Checkpoint.tensors_read` keep count.

Never pickle and never remote code: both would let a downloaded model run programs on this machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aparte.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Makes a folder a cloud shard: only the middle of a model is in it (:mod:`aparte.model.shard`).
SHARD = "manifest.json"

_AGAIN = "Download or copy it again."
#: Bounds a lying header before anything is allocated; the format's own limit.
_HEADER_LIMIT = 100_000_000
_PIECE_BYTES = 1 << 20
#: A tensor's sample is this many pieces, spread evenly from its first byte to its last.
_SAMPLE_PIECES = 16
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """What a safetensors header says of one tensor; ``begin`` and ``end`` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def item_bits(self) -> int:
        """Of one number."""
        return _DTYPE_BITS[self.dtype]


class Checkpoint:
    """The model in ``folder``. Opening it reads ``config.json`` and the index, and no weights."""

    def __init__(self, folder: Path, *, weightless: bool = False) -> None:
        """``weightless`` takes a folder without weights too: then there is no tensor."""
        self.folder = folder
        self._weightless = weightless
        #: Bytes of weights handed out by :meth:`read`, and whose they are, in order.
        self.bytes_read = 0
        self.tensors_read: list[str] = []
        #: Bytes that :meth:`sample` looked at; not part of :attr:`bytes_read`.
        self.bytes_sampled = 0
        self._headers: dict[str, dict[str, TensorEntry]] = {}
        try:
            self.config_dict: dict[str, Any] = read_config(folder)
            #: Tensor name to the name of the file that holds it.
            self._files = self._locate()
        except OSError as error:
            raise _unreadable(folder, error) from error

    @classmethod
    def open(cls, folder: Path | str, *, weightless: bool = False) -> Checkpoint:
        """Open ``folder``, or raise :class:`CheckpointError` with what is wrong with it."""
        return cls(Path(folder), weightless=weightless)

    def names(self) -> frozenset[str]:
        """Every tensor of the model, including those in shards that are not on this machine."""
        return frozenset(self._files)

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name to ``(dtype, shape)`` of every tensor whose file is here, from the headers alone."""
        entries = {name: self.entry(name) for name, file in self._files.items() if self._is_here(file)}
        return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors called ``names``, memory mapped; only the files that hold them are opened."""
        from safetensors import SafetensorError, safe_open

        wanted = list(dict.fromkeys(names))
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for name in wanted:
            self.entry(name)
            by_file[self._files[name]].append(name)
        found: dict[str, torch.Tensor] = {}
        for file, group in by_file.items():
            try:
                with safe_open(self.folder / file, framework="pt", device="cpu") as weights:
                    for name in group:
                        found[name] = weights.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise _damaged(self.folder / file, str(error)) from error
        for name in wanted:
            self.bytes_read += self.entry(name).num_bytes
            self.tensors_read.append(name)
        return {name: found[name] for name in wanted}

    def sample(self, names: Iterable[str], bytes_per_tensor: int = 4096) -> bytes | None:
        """SHA-256 over name, dtype, shape and a few spread-out pieces of each tensor's bytes.

        Two sides that serve the same tensors get the same digest, whatever order or files they are in.
        It tells different models and conversions apart; it is no proof against someone who edits the
        bytes in between. ``None`` when a file that holds one of them is not on this machine.
        """
        names = sorted(set(names))
        known = [self._files[name] for name in names if name in self._files]
        if not self._files or not all(map(self._is_here, known)):
            return None
        digest = hashlib.sha256()
        for name in names:
            entry = self.entry(name)
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            path = self.folder / self._files[name]
            try:
                with path.open("rb") as file:
                    for begin, size in _pieces(entry, bytes_per_tensor):
                        file.seek(begin)
                        piece = file.read(size)
                        digest.update(piece)
                        self.bytes_sampled += len(piece)
            except OSError as error:
                raise _unreadable(path, error) from error
        return digest.digest()

    def raw(self, name: str) -> Iterator[bytes]:
        """The bytes of the tensor ``name`` as they are in the file, a piece at a time."""
        entry = self.entry(name)
        path = self.folder / self._files[name]
        try:
            with path.open("rb") as file:
                file.seek(entry.begin)
                left = entry.num_bytes
                while left:
                    piece = file.read(min(left, _PIECE_BYTES))
                    if not piece:
                        raise _damaged(path, "it became shorter while it was read")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise _unreadable(path, error) from error

    def files_of(self, names: Iterable[str]) -> tuple[Path, ...] | None:
        """The files that hold the tensors ``names``; None if one of them is not on this machine."""
        known = {self._files.get(name) for name in names}
        if not known or None in known or not all(self._is_here(file) for file in known if file):
            return None
        return tuple(sorted(self.folder / file for file in known if file))

    def _locate(self) -> dict[str, str]:
        if (self.folder / WEIGHTS).exists():
            return dict.fromkeys(self._header(WEIGHTS), WEIGHTS)
        if (self.folder / INDEX).exists():
            return read_index(self.folder / INDEX)
        if self._weightless:
            return {}
        raise _without_weights(self.folder)

    def _is_here(self, file: str) -> bool:
        return file in self._headers or (self.folder / file).exists()

    def entry(self, name: str) -> TensorEntry:
        """What the header says of the tensor ``name``. Raises :class:`CheckpointError` if it is not here."""
        file = self._files.get(name)
        if file is None and (self.folder / SHARD).exists():
            raise CheckpointError(
                f"Tensor {name} is not in {self.folder}, which is a cloud shard: it holds a model's middle, "
                "for `aparte serve`. Give the model itself."
            )
        if file is None:
            raise CheckpointError(
                f"Tensor {name} is not in {self.folder}. The model is of another architecture than its "
                f"{CONFIG} says, or incomplete: download it again."
            )
        entry = self._header(file).get(name)
        if entry is None:
            raise CheckpointError(
                f"Tensor {name} should be in {self.folder / file} according to {INDEX}, and is not. "
                "The two do not belong together: download the model again."
            )
        return entry

    def _header(self, file: str) -> dict[str, TensorEntry]:
        if file not in self._headers:
            path = self.folder / file
            if not path.exists():
                raise CheckpointError(
                    f"{path} is missing: the model's index names it, but the file is not there. "
                    "The download is incomplete: run it again."
                )
            self._headers[file] = read_header(path)
        return self._headers[file]


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder, refused when it asks for code of its own to be run."""
    if not folder.exists():
        raise CheckpointError(f"There is no folder {folder}. Check the path.")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give the folder that holds {CONFIG} and {WEIGHTS}.")
    if not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so it is not a model in the Hugging Face layout. Give the folder "
            f"that holds {CONFIG} and {WEIGHTS}, or a GGUF file."
        )
    config = _read_json_object(folder / CONFIG)
    if config.get("auto_map"):
        raise CheckpointError(
            f"{folder / CONFIG} asks for the model's own program code to be run (auto_map), which aparte "
            "never does. Use a version of the model that Hugging Face transformers supports by itself."
        )
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{folder / CONFIG} does not say what kind of model this is. {_AGAIN}")
    return config


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name, from ``model.safetensors.index.json``."""
    files = _read_json_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise _damaged(path, "it has no weight_map")
    for file in files.values():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise _damaged(path, f"it names {file!r}, which is not a safetensors file beside it")
    return files


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, after checking that the header and the file agree."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if len(first) < 8:
                raise _damaged(path, f"it is {size} bytes long, too short for a header")
            (length,) = struct.unpack("<Q", first)
            if first == b"version ":
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` there."
                )
            if length > _HEADER_LIMIT:
                raise _damaged(path, "it does not begin with a safetensors header")
            if 8 + length > size:
                raise _damaged(path, f"it ends within its header, after {size} of {8 + length} bytes")
            text = file.read(length)
    except OSError as error:
        raise _unreadable(path, error) from error
    header = _parse_object(path, text)
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(path, name, value, 8 + length) for name, value in header.items()}
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _damaged(path, f"its header leaves a gap or an overlap before tensor {name}")
        position = entry.end
    if position > size:
        raise _damaged(
            path, f"it ends after {size:,} of {position:,} bytes, so a download or copy was cut short"
        )
    if position < size:
        raise _damaged(path, f"{size - position:,} bytes at its end belong to no tensor")
    return entries


def _parse_entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"its header does not describe tensor {name}") from None
    if any(type(number) is not int or number < 0 for number in numbers) or end < begin:
        raise _damaged(path, f"its header gives tensor {name} an impossible shape or place")
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise CheckpointError(
            f"{path}: tensor {name} has the number format {dtype!r}, which is not supported. "
            "Use a version of the model in float32, float16 or bfloat16."
        )
    if math.prod(shape) * bits // 8 != end - begin:
        raise _damaged(path, f"its header gives tensor {name} a shape that does not fill its bytes")
    return TensorEntry(dtype, tuple(shape), data_start + begin, data_start + end)


def _pieces(entry: TensorEntry, budget: int) -> list[tuple[int, int]]:
    """Offset and size of the pieces of a tensor to sample: all of it when it fits the ``budget``."""
    if entry.num_bytes <= budget:
        return [(entry.begin, entry.num_bytes)]
    size = max(1, budget // _SAMPLE_PIECES)
    last = entry.num_bytes - size
    return [(entry.begin + last * i // (_SAMPLE_PIECES - 1), size) for i in range(_SAMPLE_PIECES)]


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        return _parse_object(path, path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(path, "it is empty" if not text.strip() else "its JSON does not parse") from None
    if not isinstance(value, dict):
        raise _damaged(path, "its JSON is not an object")
    return value


def _without_weights(folder: Path) -> CheckpointError:
    files = sorted(entry.name for entry in folder.iterdir())
    if pickled := [name for name in files if name.endswith(_PICKLE_SUFFIXES)]:
        return CheckpointError(
            f"{folder} holds its weights as {pickled[0]}, a pickle file, which can run any program when it "
            "is opened; aparte never opens one. Get the model as safetensors, or convert it with "
            "save_pretrained on a machine that you can spare."
        )
    if shards := [name for name in files if name.endswith(".safetensors")]:
        return CheckpointError(
            f"{folder} holds {shards[0]} but no {INDEX} that says which tensor is in which file. "
            f"Copy {INDEX} from where the model came from."
        )
    return CheckpointError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}, so the weights are missing. Download the model again."
    )


def _damaged(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or incomplete: {cause}. {_AGAIN}")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    cause = error.strerror or str(error)
    return CheckpointError(f"{path} cannot be read: {cause}. Check that it is a file you may read.")
