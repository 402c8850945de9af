"""What a server serves, in a form that can be sent to where it is served."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from aparte.cloud.engine import Engine
from aparte.cloud.load import as_shard, load_engine
from aparte.config import Compute, Cut, ServerLimits
from aparte.errors import UserError
from aparte.fingerprint import Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.needed import needed_by_cloud
from aparte.model.parts import Blueprint, Progress
from aparte.model.registry import resolve
from aparte.model.shard import is_shard, read_manifest


@dataclass(frozen=True)
class Served:
    """The middle of ``model`` at ``cut``, or all of it without one.

    With ``ranks`` above 1 every layer is split over so many processes. ``message_bytes`` is the most that
    whoever hands on messages takes in one; nodes per step are limited accordingly.
    """

    model: str
    cut: Cut | None
    compute: Compute
    limits: ServerLimits
    ranks: int = 1
    message_bytes: int | None = None
    #: Whether a session may use fewer of the hosted layers.
    inner: bool = False

    def look(self, progress: Progress | None = None) -> Fingerprint:
        """What will be served, with nothing loaded. Raises what would be wrong with it."""
        blueprint = self._blueprint(progress)
        if self.ranks > 1:
            from aparte.model.tensor_parallel import Split

            Split(0, self.ranks).check(blueprint)
        if self.cut is not None:
            self.cut.middle(blueprint.layers)
        fingerprint = take_fingerprint(blueprint, self.cut, self.model)
        folder = blueprint.checkpoint.folder
        return as_shard(fingerprint, read_manifest(folder)) if is_shard(folder) else fingerprint

    def load(self, progress: Progress | None = None) -> Engine:
        """The engine, tried out."""
        blueprint = self._blueprint(progress)
        if self.ranks > 1:
            from aparte.cloud.ranks import Ranks

            blueprint.split = Ranks(self, blueprint).split
        limits = self._limits_for(blueprint.hidden_size)
        engine: Engine
        if self.cut is None:
            from aparte.cloud.verifier import load_verifier

            engine = load_verifier(blueprint, self.model, limits, progress)
        else:
            engine = load_engine(blueprint, self.cut, self.model, limits, progress, inner=self.inner)
        engine.probe()
        return engine

    def _blueprint(self, progress: Progress | None) -> Blueprint:
        needed = None if self.cut is None else needed_by_cloud(self.cut)
        folder = resolve(self.model, wanted=needed, tokenizer=False, progress=progress)
        return Blueprint.open(folder, self.compute)

    def _limits_for(self, width: int) -> ServerLimits:
        if self.message_bytes is None:
            return self.limits
        room = (self.message_bytes - self.limits.header_bytes) // (4 * width)
        if room < 1:
            raise UserError(f"A hidden state of {width} numbers does not fit {self.message_bytes} bytes.")
        nodes = min(self.limits.max_nodes_per_step, room)
        return dataclasses.replace(self.limits, max_nodes_per_step=nodes)
