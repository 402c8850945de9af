"""Which tensors each side of a cut needs, by name, before any of them is here."""

from __future__ import annotations

import re
from collections.abc import Callable

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
