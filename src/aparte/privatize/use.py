"""Private ends at work on a device."""

from __future__ import annotations

from pathlib import Path

from aparte.config import Cut
from aparte.model.parts import Blueprint
from aparte.privatize.ends import PrivateEnds
from aparte.privatize.file import load_ends
from aparte.target.base import Target
from aparte.target.split import SplitTarget


def adopt(blueprint: Blueprint, cut: Cut, file: Path) -> PrivateEnds:
    """Have ``blueprint`` build front and back with the private ends in ``file``, before any is built.

    Raises :class:`UserError` if they are of another model or cut. The middle's tensors have no changes.
    """
    ends = load_ends(file, blueprint, cut)
    blueprint.change = ends.change
    return ends


def hide(target: Target, ends: PrivateEnds) -> None:
    """Have ``target``, whose front and back are these private ends, add their mask to what it sends."""
    if isinstance(target, SplitTarget):
        target.hide(ends.new_mask())
