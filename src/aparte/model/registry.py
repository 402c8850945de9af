"""From what a user calls a model to a folder that :class:`~aparte.model.checkpoint.Checkpoint` opens.

MODEL is the embedded default's name, a folder, a GGUF file or a hub id.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aparte.config import DEFAULT_MODEL
from aparte.errors import CheckpointError
from aparte.model import embedded, folders, gguf, hub
from aparte.model.checkpoint import CONFIG
from aparte.model.folders import Progress
from aparte.model.needed import Wanted

FORMS = (
    f"MODEL is {DEFAULT_MODEL}, a folder with {CONFIG} and safetensors, a GGUF file, "
    "or a hub id of the form owner/name or owner/name@revision."
)
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be given as MODEL by its ``name``."""

    name: str
    source: Literal["embedded", "gguf", "hub"]
    cached: bool
    path: Path | None
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "cached": self.cached,
            "path": str(self.path) if self.path else None,
            "size_bytes": self.size_bytes,
        }


def resolve(
    model: str,
    *,
    wanted: Wanted | None = None,
    tokenizer: bool = True,
    progress: Progress | None = None,
    offline: bool = False,
) -> Path:
    """The folder of ``model``, downloaded or converted first where that is needed.

    ``wanted`` and ``tokenizer`` limit what is downloaded from a hub: to the weight files that hold tensors
    whose name ``wanted`` accepts, and to no tokenizer where the part that is built has no use for one.
    """
    if model == DEFAULT_MODEL:
        return embedded.get(progress, offline=offline)
    try:
        path = Path(model).expanduser()
        is_here = bool(model) and path.exists()
    except (OSError, RuntimeError) as error:  # not permitted, too long, no such user
        raise CheckpointError(f"{model[:200]} cannot be looked at: {error}. Check the path.") from error
    if is_here:
        return _resolve_path(path, progress)
    if _looks_like_a_path(model) and not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"There is no file or folder {model}. Check the path. {FORMS}")
    if named := hub_name(model):
        repo, revision = named
        return hub.download(
            repo,
            revision=revision,
            wanted=wanted,
            tokenizer=tokenizer,
            progress=progress,
            offline=offline,
        )
    known = [entry.name for entry in available()]
    guess = difflib.get_close_matches(model, known, n=1)
    hint = f" Did you mean {guess[0]}?" if guess else f" Known here: {', '.join(known)}."
    raise CheckpointError(f"Unknown model {model!r}.{hint} {FORMS}")


def hub_name(model: str) -> tuple[str, str | None] | None:
    """Repository and revision of ``owner/name`` or ``owner/name@revision``; None if it is something else."""
    match = _HUB_ID.fullmatch(model)
    return (match[1], match[2]) if match else None


def available() -> list[ModelEntry]:
    """The embedded default, converted GGUF files and the hub's models that are on this machine."""
    return [_embedded_entry(), *_gguf_entries(), *_hub_entries()]


def _resolve_path(path: Path, progress: Progress | None) -> Path:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / CONFIG).exists():
            raise CheckpointError(f"{path} has no {CONFIG}, but a GGUF file: give {files[0]} as MODEL.")
        return path
    if gguf.is_gguf(path):
        return gguf.convert(path, progress)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is only a model's weights. Give the folder that it is in.")
    raise CheckpointError(f"{path} is a file, but not a GGUF file. {FORMS}")


def _looks_like_a_path(model: str) -> bool:
    return (
        model.startswith((".", "/", "~"))
        or "\\" in model
        or model.count("/") > 1
        or model.endswith(("/", ".gguf", ".safetensors"))
    )


def _embedded_entry() -> ModelEntry:
    if not embedded.is_ready():
        return ModelEntry(DEFAULT_MODEL, "embedded", cached=False, path=None, size_bytes=0)
    folder = embedded.folder()
    return ModelEntry(DEFAULT_MODEL, "embedded", True, folder, folders.size_of(folder))


def _gguf_entries() -> Iterator[ModelEntry]:
    for folder in sorted(gguf.converted_dir().glob("*/")):
        source = folders.source_of(folder)
        if source is not None:
            name = source if Path(source).exists() else str(folder)
            yield ModelEntry(name, "gguf", True, folder, folders.size_of(folder))


def _hub_entries() -> Iterator[ModelEntry]:
    for repo, snapshot, size in hub.cached_models():
        yield ModelEntry(repo, "hub", True, snapshot, size)
