"""Loading the cloud's side: the middle layers and nothing else."""

from __future__ import annotations

from dataclasses import replace

from aparte.cloud.engine import Engine
from aparte.config import Cut, ServerLimits
from aparte.fingerprint import Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint, Progress
from aparte.model.shard import Manifest, check_cut, check_shard, is_shard, read_manifest


def load_engine(
    blueprint: Blueprint,
    cut: Cut,
    name: str,
    limits: ServerLimits | None = None,
    progress: Progress | None = None,
    *,
    inner: bool = False,
) -> Engine:
    """The engine for the middle of ``blueprint`` at ``cut``; ``name`` is what people call the model.

    A shard is looked through first: one that holds more or less than its manifest says is not served.
    With ``inner`` sessions may ask for some of its layers, at a cut of their own.
    """
    folder = blueprint.checkpoint.folder
    manifest = None
    if is_shard(folder):
        check_cut(read_manifest(folder), cut)
        manifest = check_shard(folder, progress)
    stage = blueprint.stage(cut.middle(blueprint.layers), progress, "middle layers")
    fingerprint = take_fingerprint(blueprint, cut, name)
    if manifest is not None:
        fingerprint = as_shard(fingerprint, manifest)
    return Engine(
        stage,
        fingerprint,
        blueprint.hidden_size,
        limits,
        blueprint.precision.name,
        (lambda asked: _part_of(fingerprint, take_fingerprint(blueprint, asked, name))) if inner else None,
    )


def _part_of(whole: Fingerprint, part: Fingerprint) -> Fingerprint:
    """A part's fingerprint; a shard's manifest covers the whole alone, but says what model it is."""
    return replace(part, name=whole.name, revision=whole.revision)


def as_shard(fingerprint: Fingerprint, manifest: Manifest) -> Fingerprint:
    """``fingerprint`` of a shard: it goes by what its manifest says."""
    return replace(fingerprint, name=manifest.model, revision=manifest.revision, manifest=manifest.digest)
