"""What drafts for several conversations with one model: weights are loaded once, state belongs to each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aparte.bridge.draft import BridgeDraft, BridgeParts
from aparte.bridge.edge import EdgeBridge, EdgeParts
from aparte.bridge.file import find_bridge, load_bridge, require_bridge
from aparte.config import Compute, Cut, Sampling
from aparte.drafting import DraftPlan
from aparte.errors import AparteError, UserError
from aparte.model.parts import Blueprint, Progress
from aparte.model.registry import resolve
from aparte.model.turns import TurnTaking
from aparte.session import Session
from aparte.speculate.calibration import Calibration
from aparte.speculate.chain import Chain
from aparte.speculate.common import CommonTable, common_table, shipped_table
from aparte.speculate.draft_model import TOP, DraftModel, check_vocabulary
from aparte.speculate.drafter import Drafter, make_drafter
from aparte.speculate.drawn import DrawnTree, open_drawn_tree
from aparte.speculate.length import LengthPlan
from aparte.speculate.neural import TreeModel
from aparte.speculate.recycling import Recycling
from aparte.speculate.shallow import open_shallow
from aparte.speculate.voice import open_voice
from aparte.target.base import Target
from aparte.target.draft import DraftTarget
from aparte.target.split import SplitTarget
from aparte.text.tokenizer import Codec

T = TypeVar("T")
Model = TreeModel | CommonTable
#: Makes a conversation's own model of what is shared.
Opener = Callable[[Target, Session], Model]


class DraftShelf:
    """The models that a plan drafts with, loaded; gives every conversation drafters of its own."""

    def __init__(
        self,
        plan: DraftPlan,
        blueprint: Blueprint,
        name: str,
        cut: Cut,
        target: str,
        codec: Codec,
        compute: Compute,
        progress: Progress | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """``name`` is what the model is called, ``target`` where it is: ``split``, ``draft`` or ``local``."""
        self.plan = plan
        self._target = target
        self._eos = codec.eos
        decoding, drafting = plan.decoding, plan.drafting
        named, automatic = decoding.sources, decoding.decode == "auto" and target != "draft"
        self._openers: dict[str, Opener] = {}
        if "common" in named:
            table = common_table(name)
            self._openers["common"] = lambda *_: table
        elif automatic and (shipped := shipped_table(name)) is not None:
            self._openers["common"] = lambda *_: shipped
        if "model" in named:
            draft_name = drafting.model or decoding.draft or ""
            folder, size = resolve(draft_name, progress=progress), blueprint.vocab_size
            model = open_draft_model(
                folder, draft_name, compute, codec, size, top=drafting.top, progress=progress
            )
            self._openers["model"] = lambda *_: model.another()
        if "shallow" in named:
            if target != "draft" or drafting.layers is None:
                raise UserError("shallow drafts in draft mode only: --target draft --draft shallow:K.")
            shallow = open_shallow(blueprint, drafting.layers, top=drafting.top, progress=progress)
            self._openers["shallow"] = lambda *_: shallow.another()
        if "bridge" in named:
            self._openers["bridge"] = self._bridge(blueprint, name, cut, progress)
        elif automatic and target == "split" and find_bridge(name, cut) is not None:
            try:
                self._openers["bridge"] = self._bridge(blueprint, name, cut, progress)
            except AparteError as error:  # a broken or strange one: worth a word, not the answers
                if notice:
                    notice(f"Drafting without a bridge. {error}")

    def models(self, target: Target, session: Session) -> dict[str, Model]:
        """Those of the conversation in ``session``, by source."""
        return {name: opener(target, session) for name, opener in self._openers.items()}

    def open(self, target: Target, session: Session, table: Recycling | None = None) -> Drafts:
        """What drafts for the conversation in ``session``, going on with ``table`` where recycling drafts."""
        return Drafts(self.plan, self._target, self.models(target, session), self._eos, table)

    def _bridge(self, blueprint: Blueprint, name: str, cut: Cut, progress: Progress | None) -> Opener:
        bridge = load_bridge(require_bridge(name, cut), blueprint, cut)
        if self._target == "split":
            parts = BridgeParts(bridge, blueprint)
            parts.stage = TurnTaking(parts.stage)
            return lambda target, session: BridgeDraft(parts, _of(SplitTarget, target), session)
        edge = EdgeParts(bridge, blueprint, cut, progress)
        edge.front, edge.stage, edge.back = map(TurnTaking, (edge.front, edge.stage, edge.back))
        drafting = self.plan.drafting

        def open_edge(target: Target, session: Session) -> EdgeBridge:
            verifier, states = _of(DraftTarget, target), None
            if drafting.return_states:
                states = verifier.keep_states(edge.returned_layer)
            return EdgeBridge(edge, session, states, top=drafting.top)

        return open_edge


class Drafts:
    """The drafters of one conversation. What they learned stays for its next answer."""

    def __init__(
        self,
        plan: DraftPlan,
        target: str,
        models: dict[str, Model],
        eos: frozenset[int],
        table: Recycling | None = None,
    ) -> None:
        self._plan = plan
        self._target = target
        self.models = models
        self._eos = eos
        self._table = table
        self._tree: Drafter | None = None
        self._chain: tuple[Sampling, Chain | DrawnTree] | None = None
        self._lengths = LengthPlan(spares_cloud=plan.drafting.spares_cloud)
        self._calibration = Calibration()

    def drafter(self, sampling: Sampling) -> Drafter:
        """For an answer whose tokens are chosen like this.

        In draft mode it is a chain if its length is given, and for coupled acceptance, because a chain picks
        its tokens as the verifier will; else a tree, which is drawn for rejection sampling.
        """
        decoding, drafting = self._plan.decoding, self._plan.drafting
        chain = self._target == "draft" and decoding.sources
        if chain and (drafting.length is not None or not sampling.greedy):
            if self._chain is None or self._chain[0] != sampling:
                self._chain = sampling, self._new_chain(sampling)
            return self._chain[1]
        if self._tree is None:
            patient = decoding.spares_cloud
            self._tree = make_drafter(decoding, self._table, self.models, patient=patient)
        return self._tree

    def _new_chain(self, sampling: Sampling) -> Chain | DrawnTree:
        decoding, drafting = self._plan.decoding, self._plan.drafting
        if drafting.length is None and drafting.accept == "rejection":
            return open_drawn_tree(
                decoding.sources,
                self.models,
                sampling,
                width=drafting.top,
                eos=self._eos,
                plan=self._lengths,
                calibration=self._calibration,
            )
        return Chain(
            [open_voice(name, self.models) for name in decoding.sources],
            sampling,
            rejection=drafting.accept == "rejection",
            length=drafting.length,
            width=drafting.top,
            eos=self._eos,
            plan=self._lengths,
        )


def open_draft_model(
    folder: Path,
    name: str,
    compute: Compute,
    codec: Codec,
    vocab_size: int,
    *,
    top: int = TOP,
    progress: Progress | None = None,
) -> DraftModel:
    """Load the draft model in ``folder`` for a target with ``codec`` and ``vocab_size``.

    It names ``top`` candidates for each token; ``name`` is for messages. Raises
    :class:`~aparte.errors.MismatchError`, before any weight is read, unless it has the same tokens.
    """
    check_vocabulary(codec, Codec(folder), name)
    return DraftModel(Blueprint.open(folder, compute), vocab_size, top=top, progress=progress)


def _of(kind: type[T], target: Target) -> T:
    if not isinstance(target, kind):
        raise UserError(f"This bridge drafts for another target than {target.name}.")
    return target
