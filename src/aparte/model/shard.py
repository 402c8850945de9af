"""Cloud shards: a model's middle in a folder of its own, so that a rented disk never holds the ends.

Beside the weights lies a manifest that lists every tensor with its hash. A shard is looked through before it
is loaded: what is listed has to be there, bit by bit, and nothing else may be. How one is written:
:mod:`aparte.model.shard_writer`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aparte.config import Cut, cache_dir
from aparte.errors import CheckpointError, CutError, UserError
from aparte.model.checkpoint import CONFIG, SHARD, Checkpoint, read_config, read_header
from aparte.model.folders import Progress, quiet
from aparte.model.needed import layer_index
from aparte.model.parts import Blueprint

FORMAT = "aparte-shard-1"
#: No manifest is as large as this.
_MANIFEST_LIMIT = 100_000_000
#: Files that hold weights, whatever is in them; of these only safetensors belong into a shard.
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".h5", ".onnx")
_AGAIN = "Make it again with `aparte shard`, or copy it again."


@dataclass(frozen=True)
class ShardTensor:
    """One tensor as the manifest lists it: safetensors' name for its numbers, shape, hash of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a shard holds: the middle at ``cut`` of a model of ``layers`` layers.

    ``model`` is what people call the model, ``revision`` its commit if it is a hub's. ``config`` is that of
    the model without what only the ends need.
    """

    model: str
    revision: str
    cut: Cut
    layers: int
    config: dict[str, Any]
    tensors: dict[str, ShardTensor]

    @property
    def digest(self) -> str:
        """``sha256:`` over cut and tensors: the same for the same middle, in whatever files it is."""
        return _digest(self.cut, {name: vars(tensor) for name, tensor in self.tensors.items()})

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "revision": self.revision,
            "cut": str(self.cut),
            "layers": self.layers,
            "digest": self.digest,
            "config": self.config,
            "tensors": {name: vars(tensor) for name, tensor in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Raises :class:`ValueError` or one of its kind for anything else than a manifest."""
        if data["format"] != FORMAT:
            raise ValueError("another format")
        tensors = {
            str(name): ShardTensor(str(one["dtype"]), tuple(map(int, one["shape"])), str(one["sha256"]))
            for name, one in data["tensors"].items()
        }
        manifest = cls(
            str(data["model"]),
            str(data["revision"]),
            Cut.parse(data["cut"]),
            int(data["layers"]),
            dict(data["config"]),
            tensors,
        )
        if manifest.digest != data["digest"]:
            raise ValueError("its digest is another one")
        return manifest


def is_shard(folder: Path) -> bool:
    """Whether ``folder`` says that it is a shard."""
    return (folder / SHARD).exists()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the shard in ``folder``. Raises :class:`CheckpointError` if it is damaged."""
    path = folder / SHARD
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise ValueError("it is too large")
        return Manifest.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}). {_AGAIN}") from None
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        UserError,
    ) as error:
        raise CheckpointError(
            f"{path} is not a shard's manifest, or was changed ({type(error).__name__}: {error}). {_AGAIN} "
            "If the folder holds a whole model, move that file elsewhere."
        ) from None


def check_cut(manifest: Manifest, cut: Cut) -> None:
    """Raise :class:`CutError` unless the shard is one of this cut."""
    if cut != manifest.cut:
        raise CutError(
            f"This is a shard of {manifest.model} for cut {manifest.cut}, and cut {cut} is wanted. It holds "
            f"no other layers: use --cut {manifest.cut} on both sides, or make a shard with `aparte shard "
            f"MODEL --cut {cut}`."
        )


def check_shard(folder: Path, progress: Progress | None = None) -> Manifest:
    """Look through the shard in ``folder``: no tensor but the middle's, and each as the manifest says.

    Reads every byte once. Raises :class:`CheckpointError` for the first thing that is wrong.
    """
    progress = progress or quiet
    manifest = read_manifest(folder)
    middle = manifest.cut.middle(manifest.layers)
    if wrong := sorted(name for name in manifest.tensors if layer_index(name) not in middle):
        raise _no_end(folder, SHARD, wrong[0], manifest)
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        file = str(path.relative_to(folder))
        if path.suffix.lower() not in _WEIGHT_SUFFIXES:
            continue
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path} does not belong to the shard. Remove it. {_AGAIN}")
        for name in read_header(path):
            if layer_index(name) not in middle:
                raise _no_end(folder, file, name, manifest)
            if name not in manifest.tensors or name in found:
                what = "twice" if name in found else "and its manifest does not list it"
                raise CheckpointError(f"{folder} holds the tensor {name} {what}. {_AGAIN}")
            found[name] = file
    if missing := sorted(set(manifest.tensors) - set(found)):
        raise CheckpointError(f"{folder} does not hold the tensor {missing[0]} of its manifest. {_AGAIN}")
    if read_config(folder) != manifest.config:
        raise CheckpointError(f"{folder / CONFIG} is not the one that the manifest lists. {_AGAIN}")
    checkpoint = Checkpoint.open(folder)
    if checkpoint.names() != manifest.tensors.keys():
        raise CheckpointError(f"The index of {folder} names other tensors than its manifest. {_AGAIN}")
    total = sum(checkpoint.entry(name).num_bytes for name in found)
    done = 0
    for name, listed in manifest.tensors.items():
        entry = checkpoint.entry(name)
        if (entry.dtype, entry.shape) != (listed.dtype, listed.shape):
            raise CheckpointError(
                f"The tensor {name} in {folder / found[name]} is {entry.dtype} of shape {list(entry.shape)}, "
                f"and the manifest lists {listed.dtype} of shape {list(listed.shape)}. {_AGAIN}"
            )
        if hash_of(checkpoint, name) != listed.sha256:
            raise CheckpointError(
                f"The tensor {name} in {folder / found[name]} is not the one that the manifest lists: its "
                f"hash is another one. {_AGAIN}"
            )
        done += entry.num_bytes
        progress("checking the shard", done, total)
    return manifest


def hash_of(checkpoint: Checkpoint, name: str) -> str:
    """SHA-256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for piece in checkpoint.raw(name):
        digest.update(piece)
    return digest.hexdigest()


def digest_of_middle(blueprint: Blueprint, cut: Cut, progress: Progress | None = None) -> str:
    """The digest that the manifest of a shard of this middle has; empty if its weights are not all here.

    That takes reading all of them, so the result is kept in the cache, for as long as the files stay what
    they are.
    """
    checkpoint, names = blueprint.checkpoint, blueprint.middle_names(cut)
    files = checkpoint.files_of(names)
    if files is None:
        return ""
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([FORMAT, str(cut), sorted(names), states]).encode()).hexdigest()[:32]
    kept = cache_dir() / "manifests" / key
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"sha256:[0-9a-f]{64}", known := kept.read_text(encoding="ascii").strip()):
            return known
    tensors = {}
    for done, name in enumerate(names):
        if progress:
            progress("checking the middle against the cloud's manifest", done, len(names))
        entry = checkpoint.entry(name)
        tensors[name] = vars(ShardTensor(entry.dtype, entry.shape, hash_of(checkpoint, name)))
    digest = _digest(cut, tensors)
    with contextlib.suppress(OSError):  # it is only for next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f".{key}.{secrets.token_hex(4)}.part")
        part.write_text(f"{digest}\n", encoding="ascii")
        part.replace(kept)
    return digest


def _digest(cut: Cut, tensors: dict[str, dict[str, Any]]) -> str:
    text = json.dumps([FORMAT, str(cut), tensors], sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _no_end(folder: Path, file: str, name: str, manifest: Manifest) -> CheckpointError:
    return CheckpointError(
        f"{folder / file} holds {name}, which is no part of the middle of {manifest.model} at cut "
        f"{manifest.cut}. A shard must not hold the ends: nothing is served. Delete it there, and make the "
        "shard with `aparte shard` on a machine that you trust."
    )


def names_by_layer(names: Iterable[str]) -> list[str]:
    """``names`` in the order of their layers."""
    return sorted(names, key=lambda name: (layer_index(name) or 0, name))
