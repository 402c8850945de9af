"""``aparte bridge train`` from beginning to end: model, conversations, training, the finished file."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from aparte.bridge.corpus import write_corpus
from aparte.bridge.file import bridge_path, read_bridge, save_bridge
from aparte.bridge.net import BridgeNet
from aparte.bridge.questions import read_paragraphs
from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations, Recipe, Report, Trainer, claim
from aparte.config import Compute, Cut
from aparte.errors import UserError
from aparte.measure.prompts import digest
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint, Precision, Progress

#: Tokens of conversations written side by side, and of each: longer ones with texts, which take up room.
TOGETHER = 98_304
LENGTH, WITH_TEXT = 512, 1024


@dataclass(frozen=True)
class Workshop:
    """What one run needs, and where its files go."""

    blueprint: Blueprint
    teacher: Teacher
    cut: Cut
    name: str
    work: Path
    out: Path
    recipe: Recipe
    #: Files with passages to ask about, and a bridge to go on from.
    texts: tuple[Path, ...] = ()
    start: Path | None = None

    @classmethod
    def open(
        cls,
        name: str,
        cut: Cut,
        device: str,
        *,
        work: Path | None,
        out: Path | None,
        recipe: Recipe,
        texts: Sequence[Path] = (),
        start: Path | None = None,
        progress: Progress | None = None,
    ) -> Workshop:
        """Load the whole model. Raises :class:`~aparte.errors.UserError` for a cut that does not fit it."""
        from aparte.model.registry import resolve

        folder = resolve(name, progress=progress)
        blueprint = Blueprint.open(folder, Compute("float32", device))
        kind = blueprint.config.model_type
        if not (blueprint.family.plain or kind == "qwen3"):
            raise UserError(
                f"Bridges are not trained for the family {kind!r} yet: its layers are not of the plain kind. "
                "Use --decode auto, which does without one."
            )
        cut.check(blueprint.layers)
        place = Precision.resolve(Compute("float32", device)).device
        out = out or bridge_path(name, cut)
        work = work or out.parent / "work" / out.stem
        return cls(blueprint, Teacher(folder, cut, place), cut, name, work, out, recipe, tuple(texts), start)

    def run(
        self, tokens: int, progress: Progress | None, report: Callable[[Report], None], keep: bool = False
    ) -> Path:
        """Write or find the conversations, train or go on training, save the bridge.

        Then clear up, unless ``keep``.
        """
        corpus = self.work / "conversations"
        corpus.mkdir(parents=True, exist_ok=True)
        folder = self.blueprint.checkpoint.folder
        fingerprint = take_fingerprint(self.blueprint, self.cut, self.name)
        paragraphs = read_paragraphs(self.texts)
        begun = None if self.start is None else read_bridge(self.start, self.blueprint, self.cut)
        settings = {"model": fingerprint.to_json(), "tokens": tokens, "recipe": asdict(self.recipe)}
        if paragraphs:
            settings["texts"] = digest(paragraphs)
        if self.start is not None:
            settings["start"] = digest([self.start.read_bytes().hex()])
        claim(self.work, settings)
        length = WITH_TEXT if paragraphs else LENGTH
        rows = max(self.recipe.held_out_rows + self.recipe.rows, min(TOGETHER, tokens) // length)
        shards = list(
            write_corpus(
                self.teacher,
                folder,
                corpus,
                tokens=tokens,
                rows=rows,
                length=length,
                seed=self.recipe.seed,
                progress=progress,
                paragraphs=paragraphs,
            )
        )
        data = Conversations(shards, self.recipe.held_out_rows)
        net = self.new_net(data)
        if begun is not None:
            net.load_state_dict(begun.net.state_dict())
        draft_ids = None if begun is None else begun.draft_ids
        trainer = Trainer(self.teacher, net, data, self.recipe, self.work, draft_ids)

        def reported(line: Report) -> None:
            if progress:
                progress("training", line.step, line.steps)
            report(line)

        trainer.run(reported)
        save_bridge(self.out, trainer.net, trainer.draft_ids, fingerprint)
        if not keep:
            shutil.rmtree(self.work)
        return self.out

    def new_net(self, data: Conversations) -> BridgeNet:
        """An untrained bridge: its layer begins as a copy of the middle's last one."""
        torch.manual_seed(self.recipe.seed)
        last = self.teacher.layers[self.teacher.middle.stop - 1]
        net = BridgeNet(copy.deepcopy(last).float(), self.teacher.config.hidden_size)
        net.to(self.teacher.device).begin_as_copy()
        net.requires_grad_(True)
        with torch.no_grad():
            for name, value in data.statistics().items():
                getattr(net, name).copy_(value)
        return net
