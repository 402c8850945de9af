"""Loading the cloud's side: the middle layers and nothing else."""

from __future__ import annotations

from aparte.cloud.engine import Engine
from aparte.config import Cut, ServerLimits
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint, Progress


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

    With ``inner`` sessions may ask for some of its layers, at a cut of their own.
    """
    stage = blueprint.stage(cut.middle(blueprint.layers), progress, "middle layers")
    return Engine(
        stage,
        take_fingerprint(blueprint, cut, name),
        blueprint.hidden_size,
        limits,
        blueprint.precision.name,
        (lambda asked: take_fingerprint(blueprint, asked, name)) if inner else None,
    )
