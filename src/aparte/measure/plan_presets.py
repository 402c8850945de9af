"""What a plan knows of a model: its configuration, without any weight, and what was measured with it.

Presets are small files in ``presets/``: the sizes of the models of both papers and of the embedded default,
written from their public configurations, with the times that the papers or this project measured.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aparte.errors import CheckpointError
from aparte.model.checkpoint import CONFIG, read_config
from aparte.model.gguf import is_gguf
from aparte.model.registry import hub_name

_FOLDER = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Known:
    """A model's ``config.json`` and, of a preset, what is known beyond it.

    ``measured`` holds times in milliseconds and their source; ``printed`` the figures that a paper prints for
    the same thing as a plan; ``draft`` a pair of models that a paper measured in draft mode.
    """

    name: str
    config: dict[str, Any]
    source: str
    measured: dict[str, Any] = field(default_factory=dict)
    printed: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)


def preset_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def look_up(model: str) -> Known:
    """A preset, a folder, a GGUF file or a hub id; of the last only ``config.json`` is fetched.

    Raises :class:`~aparte.errors.CheckpointError` for anything else.
    """
    if model in preset_names():
        return _preset(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return Known(model, read_config(path), f"{CONFIG} in {path}")
    if path.is_file() and is_gguf(path):
        from aparte.model.gguf_config import model_config
        from aparte.model.gguf_file import GgufFile

        return Known(model, model_config(GgufFile(path)).to_dict(), f"metadata of {path}")
    if path.is_file() and path.name == CONFIG:
        return Known(model, read_config(path.parent), str(path))
    if named := hub_name(model):
        from aparte.model.hub import download_config

        return Known(model, read_config(download_config(*named)), f"{CONFIG} of {model} on the hub")
    guess = difflib.get_close_matches(model, preset_names(), n=1)
    raise CheckpointError(
        f"Unknown model {model!r}. "
        + (f"Did you mean {guess[0]}? " if guess else "")
        + f"Give a folder with {CONFIG}, a GGUF file, a hub id of the form owner/name, or one of "
        f"{', '.join(preset_names())}."
    )


def _preset(name: str) -> Known:
    data = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Known(
        name,
        data["config"],
        "preset: sizes from the model's public configuration",
        data.get("measured", {}),
        data.get("printed", {}),
        data.get("draft", {}),
    )
