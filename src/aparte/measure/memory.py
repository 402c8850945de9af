"""What loading a part of a model takes, at its peak and afterwards, against the size of its tensors.

Each part is loaded in a process of its own, whose memory a thread reads from ``/proc`` while the layers
come in. Counted is memory that is the process's alone. Pages of a mapped checkpoint are the system's: it
drops them when somebody else needs the room.
"""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aparte.config import Compute, Cut
from aparte.errors import AparteError, UserError
from aparte.model.parts import Blueprint

#: The parts that can be measured: what a device holds, what a cloud holds, both.
PARTS = ("front-back", "middle", "whole")
#: How often memory is read while a part is loaded.
_EVERY_S = 0.002
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Loaded:
    """Bytes of one part. ``runtime`` is what the process held before it loaded anything."""

    part: str
    dtype: str
    tensors: int
    runtime: int
    peak: int
    held: int

    def to_dict(self) -> dict[str, Any]:
        """In bytes, with both relations to the size of the tensors; without the runtime."""
        return asdict(self) | {
            "peak_over_tensors": round((self.peak - self.runtime) / self.tensors, 3),
            "held_over_tensors": round((self.held - self.runtime) / self.tensors, 3),
        }


def measure(folder: Path, cut: Cut, part: str, compute: Compute) -> Loaded:
    """Load ``part`` in a new process. Raises :class:`UserError` where the system doesn't tell its memory."""
    if not _STATUS.exists():
        raise UserError("Memory is read from /proc, which this system does not have. Run this on Linux.")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, folder, cut, part, compute), daemon=True)
    child.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        raise AparteError(
            f"The process that loaded the {part} ended early; the machine may have too little memory."
        ) from None
    finally:
        child.join()
    if isinstance(result, AparteError):
        raise result
    return Loaded(**result)


def tensor_bytes(blueprint: Blueprint, cut: Cut, part: str) -> int:
    """Bytes of the part's tensors in the numbers that it computes with."""
    shapes = {name: shape for name, (_, shape) in blueprint.checkpoint.shapes().items()}
    sizes = blueprint.precision.tensor_bytes
    middle = cut.middle(blueprint.layers)
    ends = [layer for layer in range(blueprint.layers) if layer not in middle]
    layers = {"front-back": ends, "middle": list(middle), "whole": list(range(blueprint.layers))}[part]
    total = sum(sizes(shapes[name]) for name in blueprint.names(layers))
    if part != "middle":
        embed, head = blueprint.end_names()
        total += sizes(shapes[embed], table=True) + sizes(shapes[head], head=True)
    return total


def _child(pipe: Any, folder: Path, cut: Cut, part: str, compute: Compute) -> None:
    try:
        pipe.send(_load(folder, cut, part, compute))
    except AparteError as error:
        pipe.send(error)
    finally:
        pipe.close()


def _load(folder: Path, cut: Cut, part: str, compute: Compute) -> dict[str, Any]:
    blueprint = Blueprint.open(folder, compute)
    middle = cut.middle(blueprint.layers)
    ranges = {
        "front-back": [range(middle.start), range(middle.stop, blueprint.layers)],
        "middle": [middle],
        "whole": [range(blueprint.layers)],
    }[part]
    blueprint.empty_layer(0)
    _ = blueprint.compiles  # loads the compiler
    runtime = _private_bytes()
    with _Peak() as peak:
        # Whoever loads a part keeps all of it.
        kept: list[Any] = [blueprint.ends()] if part != "middle" else []
        kept += [blueprint.stage(layers) for layers in ranges]
    held = _private_bytes()
    del kept
    return {
        "part": part,
        "dtype": blueprint.precision.name,
        "tensors": tensor_bytes(blueprint, cut, part),
        "runtime": runtime,
        "peak": max(peak.most, held),
        "held": held,
    }


class _Peak:
    """The most memory that was seen while the block ran."""

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self.most = max(self.most, _private_bytes())


def _private_bytes() -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise UserError("This system's /proc does not tell a process's private memory (RssAnon).")
