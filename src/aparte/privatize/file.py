"""Private ends on disk: one safetensors file that only its owner may read, for one model at one cut."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from aparte.config import Cut, cache_dir
from aparte.errors import CheckpointError, MismatchError
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.privatize.ends import KEY_BYTES, Change, PrivateEnds, Veil

FORMAT = "aparte-private-ends-1"
_UP, _DOWN, _VEIL = ".up", ".down", "veil."


def save_ends(path: Path, ends: PrivateEnds, blueprint: Blueprint, cut: Cut) -> None:
    """Write the file, readable by its owner alone."""
    tensors = {"key": torch.tensor(list(ends.key), dtype=torch.uint8)}
    tensors |= {f"{_VEIL}{name}": getattr(ends.veil, name).float() for name in Veil.__dataclass_fields__}
    for name, change in ends.changes.items():
        tensors[name + _UP] = change.up.float()
        if change.down is not None:
            tensors[name + _DOWN] = change.down.float()
    header = identity(blueprint, cut) | {"settings": json.dumps(dict(ends.settings))}
    write_secret(path, tensors, header)


def write_secret(path: Path, tensors: Mapping[str, torch.Tensor], header: dict[str, str]) -> None:
    """Written beside first, so that a file with the right name is whole; never readable by others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    data = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, header)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


def load_ends(path: Path, blueprint: Blueprint, cut: Cut) -> PrivateEnds:
    """The private ends in ``path``, for the model and cut at hand.

    Raises :class:`MismatchError` if they were trained for others, :class:`CheckpointError` if there are none.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} does not hold private ends. Train them with `aparte privatize`."
                )
            _check(path, header, identity(blueprint, cut))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        settings = json.loads(header["settings"])
        key = bytes(tensors.pop("key").tolist())
        veil = Veil(**{name: tensors.pop(f"{_VEIL}{name}") for name in Veil.__dataclass_fields__})
        changes = {
            name.removesuffix(_UP): Change(value, tensors.get(name.removesuffix(_UP) + _DOWN))
            for name, value in tensors.items()
            if name.endswith(_UP)
        }
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} can't be read as private ends ({type(error).__name__}). Train them again with "
            "`aparte privatize`, or leave out --private-ends."
        ) from error
    ends = PrivateEnds(key, veil, changes, settings, digest)
    _check_shapes(path, ends, blueprint, cut)
    return ends


def ends_path(name: str, cut: Cut) -> Path:
    """Where ``aparte privatize`` puts the private ends of model ``name``: in the cache folder."""
    place = Path(name).expanduser()
    name = str(place.resolve()) if place.exists() else name
    plain = "".join(char if char.isalnum() or char in "-." else "_" for char in name)
    return cache_dir() / "private-ends" / f"{plain}-{cut.front}-{cut.back}.safetensors"


def identity(blueprint: Blueprint, cut: Cut) -> dict[str, str]:
    """What private ends belong to: hashes of the configuration, of the middle and of the public ends."""
    model = take_fingerprint(blueprint, cut, "this model")
    middle = set(blueprint.middle_names(cut))
    sample = blueprint.checkpoint.sample(name for name in blueprint.all_names() if name not in middle)
    return {
        "format": FORMAT,
        "cut": model.cut,
        "config": model.config,
        "tensors": model.tensors,
        "ends": sample.hex()[:32] if sample else "",
    }


def _check(path: Path, header: dict[str, str], here: dict[str, str]) -> None:
    if header.get("cut") != here["cut"]:
        raise MismatchError(
            f"The private ends in {path} are for cut {header.get('cut')}, and this is cut {here['cut']}. "
            f"Use that one, or train others with `aparte privatize --cut {here['cut']}`."
        )
    # On a device that fetched only its own shards the middle's tensors can't be compared.
    known = [name for name in ("config", "tensors", "ends") if here[name]]
    if any(header.get(name) != here[name] for name in known):
        raise MismatchError(
            f"The private ends in {path} are for another model. Train some for this one with "
            "`aparte privatize`."
        )


def _check_shapes(path: Path, ends: PrivateEnds, blueprint: Blueprint, cut: Cut) -> None:
    """A file that fits the model's header may still be damaged, or made to do harm."""
    shapes = blueprint.shapes(
        index for index in range(blueprint.layers) if index not in cut.middle(blueprint.layers)
    )
    width, veil = blueprint.hidden_size, ends.veil
    size, decoys = veil.size, len(veil.table)
    wanted = ((width, size), (size, width), (width,), (decoys, size), (decoys,), (size, size))
    found = tuple(tuple(getattr(veil, name).shape) for name in Veil.__dataclass_fields__)
    fits = len(ends.key) == KEY_BYTES and found == wanted and decoys > 0
    for name, change in ends.changes.items():
        parts = (change.up,) if change.down is None else (change.up, change.down)
        if (
            name not in shapes
            or any(part.ndim != 2 for part in parts)
            or (change.down is not None and change.up.shape[1] != change.down.shape[0])
            or (change.up.shape[0], parts[-1].shape[1]) != shapes[name]
        ):
            fits = False
    tensors = [getattr(veil, name) for name in Veil.__dataclass_fields__]
    tensors += [
        *(part for change in ends.changes.values() for part in (change.up, change.down) if part is not None)
    ]
    if not fits or not all(torch.isfinite(part).all() for part in tensors):
        raise CheckpointError(
            f"{path} holds private ends that do not fit this model, or numbers that are none. Train them "
            "again with `aparte privatize`."
        )
