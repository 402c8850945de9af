"""Which tensors each side of a cut needs, by name, before any of them is here."""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from aparte.config import Cut

#: Says of a tensor's name, and the number of layers of its model, whether the tensor is needed.
Wanted = Callable[[str, int], bool]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_index(name: str) -> int | None:
    """The decoder layer that the tensor ``name`` belongs to, None for the ends."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def needed_by_cloud(cut: Cut) -> Wanted:
    """The middle layers' tensors."""
    return lambda name, layers: layer_index(name) in cut.middle(layers)


def needed_by_device(cut: Cut) -> Wanted:
    """Everything but the middle layers' tensors."""
    return lambda name, layers: layer_index(name) not in cut.middle(layers)


def nothing(name: str, layers: int) -> bool:  # noqa: ARG001
    """No tensor at all: a device that drafts with something else needs the configuration only."""
    return False


def needed_to_draft(cut: Cut, names: Container[str], shallow_layers: int | None) -> Wanted:
    """What a device in draft mode needs of the verifier's model, for the drafters called ``names``."""
    if "bridge" not in names and shallow_layers is None:
        return nothing
    first = range(shallow_layers or 0)

    def wanted(name: str, layers: int) -> bool:
        index = layer_index(name)
        own = "bridge" in names and index not in cut.middle(layers)
        return index is None or index in first or own

    return wanted
