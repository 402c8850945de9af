"""Loading what ``bench spade`` measures: a verifier in this process, and the drafts of the edge."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from aparte.answer import Writer
from aparte.bridge.edge import EdgeBridge, EdgeParts
from aparte.bridge.file import load_bridge
from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.verifier import Verifier, load_verifier
from aparte.config import Cut
from aparte.fingerprint import WHOLE
from aparte.measure.simulated_link import SimulatedLink
from aparte.measure.spade import Edge
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint, Progress
from aparte.speculate.common import CommonTable, common_table
from aparte.speculate.draft_model import DraftModel, check_vocabulary
from aparte.speculate.neural import TreeModel
from aparte.speculate.settings import Drafting
from aparte.speculate.shallow import open_shallow
from aparte.target.draft import DraftTarget
from aparte.text.tokenizer import Codec


@dataclass(frozen=True)
class Sides:
    """``edge`` with returned states and ``bare`` without; the same one where the draft has no use for them.

    ``plain`` has the same verifier without ``--batch-invariant``, if the others have it with that.
    ``memory_share`` is the edge's part of the whole model's numbers.
    """

    edge: Edge
    bare: Edge
    memory_share: float
    plain: Edge | None = None

    def close(self) -> None:
        for edge in (self.edge, self.bare, self.plain):
            if edge is not None:
                edge.writer.target.close()


def open_sides(
    blueprint: Blueprint,
    name: str,
    drafting: Drafting,
    *,
    bridge: Path | None = None,
    cut: Cut | None = None,
    draft_model: Blueprint | None = None,
    profile: WanProfile | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> Sides:
    """Load the verifier once, and what ``drafting`` names.

    ``bridge`` is its file, trained for ``cut``; ``draft_model`` another model of the same tokens. ``profile``
    is the link that the pace of drafting goes by.
    """
    verifier = load_verifier(blueprint, name, progress=progress)
    whole = _parameters(blueprint, blueprint.layers)
    models: dict[str, TreeModel | CommonTable] = {}
    held = 0
    if "common" in drafting.names:
        models["common"] = common_table(name)
    if drafting.layers is not None:
        models["shallow"] = open_shallow(blueprint, drafting.layers, progress=progress)
        held += _parameters(blueprint, drafting.layers)
    if draft_model is not None:
        ours, theirs = (Codec(one.checkpoint.folder) for one in (blueprint, draft_model))
        check_vocabulary(ours, theirs, drafting.model or "")
        models["model"] = DraftModel(draft_model, blueprint.vocab_size, progress=progress)
        held += _parameters(draft_model, draft_model.layers)
    connect = partial(_connect, blueprint, drafting, profile or WanProfile(), clock)
    plain = None
    if blueprint.precision.invariant:
        without = Blueprint(blueprint.checkpoint, replace(blueprint.precision, invariant=False), checked=True)
        plain = connect(load_verifier(without, name, progress=progress), {})
    connect = partial(connect, verifier)
    if bridge is None:
        edge = connect(models)
        return Sides(edge, edge, held / whole, plain)
    cut = cut or Cut()
    parts = EdgeParts(load_bridge(bridge, blueprint, cut), blueprint, cut, progress)
    share = (held + parts.parameters) / whole
    return Sides(connect(models, parts, states=True), connect(models, parts), share, plain)


def _connect(
    blueprint: Blueprint,
    drafting: Drafting,
    profile: WanProfile,
    clock: Callable[[], float],
    verifier: Verifier,
    models: Mapping[str, TreeModel | CommonTable],
    parts: EdgeParts | None = None,
    *,
    states: bool = False,
) -> Edge:
    """A conversation of its own with the verifier."""
    number_format = blueprint.precision.default_wire
    link = SimulatedLink(InProcessLink(verifier, number_format), clock)
    link.profile = profile
    rejection = drafting.accept == "rejection"
    target = DraftTarget(blueprint, link, number_format, rejection=rejection, clock=link.clock)
    writer = Writer(target, Codec(blueprint.checkpoint.folder), WHOLE, clock=link.clock)
    if parts is not None:
        store = target.keep_states(parts.returned_layer) if states else None
        models = {**models, "bridge": EdgeBridge(parts, writer.session, store)}
    return Edge(writer, link, drafting.names, models)


def _parameters(blueprint: Blueprint, layers: int) -> int:
    """Numbers in the first ``layers`` layers, embedding, final norm and head; tied tables are one."""
    shapes = blueprint.checkpoint.shapes()
    tied = blueprint.config.tie_word_embeddings or "lm_head.weight" not in shapes
    tables = (1 if tied else 2) * blueprint.vocab_size * blueprint.hidden_size
    inner = sum(math.prod(shapes[name][1]) for name in blueprint.names(range(layers)))
    return inner + tables + blueprint.hidden_size
