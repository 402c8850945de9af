"""Writes a cloud shard: the middle's tensors, byte by byte as they are, and the manifest.

Bytes are copied a piece at a time and hashed on the way, so that memory does not grow with the model.
The folder appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aparte.config import Cut
from aparte.errors import CheckpointError, UserError
from aparte.model.checkpoint import CONFIG, INDEX, SHARD, WEIGHTS, Checkpoint
from aparte.model.fingerprint import CONFIG_KEYS, FAMILY_KEYS, take_fingerprint
from aparte.model.folders import Progress, quiet
from aparte.model.parts import Blueprint
from aparte.model.shard import Manifest, ShardTensor, is_shard, names_by_layer

#: Weights go into files of about this size.
FILE_BYTES = 2 * 10**9
#: Of a configuration only the ends, training or the tokenizer have a use for these.
_NOT_THE_MIDDLES = frozenset(
    {
        "vocab_size", "tie_word_embeddings", "embedding_multiplier", "logits_scaling", "logit_scale",
        "final_logit_softcapping", "initializer_range", "classifier_dropout", "embd_pdrop", "use_cache",
        "router_aux_loss_coef", "output_router_logits",
    }
)  # fmt: skip


def write_shard(
    blueprint: Blueprint,
    cut: Cut,
    name: str,
    out: Path,
    progress: Progress | None = None,
    file_bytes: int = FILE_BYTES,
) -> Manifest:
    """Write the middle of ``blueprint`` at ``cut`` to the folder ``out``, which must not be there yet.

    ``name`` is what people call the model. Raises :class:`UserError` if there is no room, or something is
    in the way.
    """
    checkpoint = blueprint.checkpoint
    if is_shard(checkpoint.folder):
        raise UserError(f"{checkpoint.folder} is a shard already. Give the model that it was made from.")
    names = names_by_layer(blueprint.middle_names(cut))
    needed = sum(checkpoint.entry(each).num_bytes for each in names)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is there already. Remove it, or choose another folder with --out.")
        out.parent.mkdir(parents=True, exist_ok=True)
        if needed > (free := shutil.disk_usage(out.parent).free):
            raise UserError(
                f"The shard takes {needed / 1e9:.1f} GB, and {out.parent} has {free / 1e9:.1f} GB free. Make "
                "room, or choose another place with --out."
            )
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        try:
            manifest = _fill(partial, blueprint, cut, name, names, progress or quiet, file_bytes)
            partial.chmod(0o755)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}).") from None
    return manifest


def _fill(
    folder: Path,
    blueprint: Blueprint,
    cut: Cut,
    name: str,
    names: list[str],
    progress: Progress,
    file_bytes: int,
) -> Manifest:
    groups = list(_groups(blueprint.checkpoint, names, file_bytes))
    hashes: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = WEIGHTS if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        for each, digest in _write_file(folder / file, blueprint.checkpoint, group):
            hashes[each] = digest
            progress("writing the shard", len(hashes), len(names))
        weight_map.update(dict.fromkeys(group, file))
    if len(groups) > 1:
        _write_json(folder / INDEX, {"weight_map": weight_map})
    config = _config_of_middle(blueprint)
    _write_json(folder / CONFIG, config)
    ours = take_fingerprint(blueprint, cut, name)
    entries = {each: blueprint.checkpoint.entry(each) for each in names}
    tensors = {each: ShardTensor(entry.dtype, entry.shape, hashes[each]) for each, entry in entries.items()}
    manifest = Manifest(ours.name, ours.revision, cut, blueprint.layers, config, tensors)
    _write_json(folder / SHARD, manifest.to_json())
    # What the cloud will take has to be what devices will ask for.
    again = Blueprint(Checkpoint.open(folder), blueprint.precision, checked=True)
    theirs = take_fingerprint(again, cut, name)
    if (theirs.config, theirs.tensors) != (ours.config, ours.tensors):
        raise CheckpointError(
            f"The middle of {name} cannot stand by itself: its layers depend on more of the model's "
            "configuration than a shard keeps. Serve the model as it is, and report this."
        )
    return manifest


def _groups(checkpoint: Checkpoint, names: list[str], file_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        num_bytes = checkpoint.entry(name).num_bytes
        if group and size + num_bytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += num_bytes
    yield group


def _write_file(path: Path, checkpoint: Checkpoint, names: list[str]) -> Iterator[tuple[str, str]]:
    """One safetensors file; yields each name with the hash of its bytes when it is written."""
    # Wide numbers first, so that every tensor begins at a multiple of its numbers' size.
    ordered = sorted(names, key=lambda name: -checkpoint.entry(name).item_bits)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        entry = checkpoint.entry(name)
        begin, end = end, end + entry.num_bytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in ordered:
            digest = hashlib.sha256()
            for piece in checkpoint.raw(name):
                digest.update(piece)
                file.write(piece)
            yield name, digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())


def _config_of_middle(blueprint: Blueprint) -> dict[str, Any]:
    """The configuration as far as decoder layers depend on it.

    Only what the family itself declares goes in: other fields are notes of whoever made the model.
    """
    declared = {*CONFIG_KEYS, *FAMILY_KEYS}
    for kind in _own_classes(type(blueprint.config)):
        declared |= vars(kind).get("__annotations__", {}).keys()
    # Some fields are kept under another name than the one that they are declared by.
    names = type(blueprint.config).attribute_map
    declared |= {names[key] for key in declared & names.keys()}
    values: dict[str, Any] = json.loads(blueprint.config.to_json_string(use_diff=False))
    return {
        key: value
        for key, value in sorted(values.items())
        if key in declared and key not in _NOT_THE_MIDDLES and not key.endswith("_token_id")
    }


def _own_classes(kind: type) -> tuple[type, ...]:
    """The classes of a configuration that are its family's, without those that all families share."""
    from transformers import PreTrainedConfig

    return kind.__mro__[: kind.__mro__.index(PreTrainedConfig)]


def _write_json(path: Path, value: Any) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
