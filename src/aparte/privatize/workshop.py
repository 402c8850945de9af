"""``aparte privatize`` from beginning to end: model, conversations, the mask's shape, training, the file."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from aparte.bridge.corpus import write_corpus
from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations, claim
from aparte.config import Compute, Cut
from aparte.errors import UserError
from aparte.model.parts import Blueprint, Precision, Progress
from aparte.privatize.ends import KEY_BYTES, PrivateEnds, Veil
from aparte.privatize.file import ends_path, identity, save_ends, write_secret
from aparte.privatize.net import EndsNet
from aparte.privatize.shaping import sensitivity, shape_veil
from aparte.privatize.train import Recipe, Report, Trainer, seed_from

#: Conversations written side by side, and tokens of each.
ROWS = 48
LENGTH = 192
#: Conversations that go through the model together while it is measured.
TOGETHER = 4


@dataclass(frozen=True)
class Workshop:
    """What one run needs, and where its files go."""

    blueprint: Blueprint
    teacher: Teacher
    cut: Cut
    work: Path
    out: Path
    recipe: Recipe

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
        progress: Progress,
    ) -> Workshop:
        """Load the whole model. Raises :class:`~aparte.errors.UserError` if it can't be done with it."""
        from aparte.model.registry import resolve

        out = out or ends_path(name, cut)
        if out.exists():
            raise UserError(
                f"{out} exists. It may be in use, and what it hides cannot be made again: move it away, or "
                "give another --out."
            )
        folder = resolve(name, progress=progress)
        blueprint = Blueprint.open(folder, Compute("float32", device))
        kind = blueprint.config.model_type
        if not (blueprint.family.plain or kind == "qwen3"):
            raise UserError(
                f"Private ends are not trained for the family {kind!r} yet: its layers are not of the plain "
                "kind. Use another model, or go without."
            )
        cut.check(blueprint.layers)
        place = Precision.resolve(Compute("float32", device)).device
        work = work or out.parent / "work" / out.stem
        return cls(blueprint, Teacher(folder, cut, place), cut, work, out, recipe)

    def run(
        self, tokens: int, progress: Progress, report: Callable[[Report], None], keep: bool = False
    ) -> Path:
        """Write or find the conversations, shape the mask, train or go on training, save.

        Then clear up, unless ``keep``.
        """
        recipe = self.recipe
        corpus = self.work / "conversations"
        self.work.mkdir(parents=True, exist_ok=True)
        self.work.chmod(0o700)
        corpus.mkdir(exist_ok=True)
        claim(
            self.work,
            {"model": identity(self.blueprint, self.cut), "tokens": tokens, "recipe": asdict(recipe)},
        )
        key = self._key()
        paths = list(
            write_corpus(
                self.teacher,
                self.blueprint.checkpoint.folder,
                corpus,
                tokens=tokens,
                rows=max(recipe.held_out_rows + recipe.rows, min(ROWS, tokens // LENGTH)),
                length=LENGTH,
                seed=recipe.seed,
                progress=progress,
            )
        )
        data = Conversations(paths, recipe.held_out_rows)
        veil = self._veil(data, progress)
        prefixes = [self.blueprint.layer_prefix(index) for index in range(self.blueprint.layers)]
        net = EndsNet(self.teacher, prefixes, recipe.rank, seed_from(key, "changes")).to(self.teacher.device)
        reports: list[Report] = []

        def reported(line: Report) -> None:
            progress("training", line.step, line.steps)
            reports.append(line)
            report(line)

        Trainer(self.teacher, net, veil, data, recipe, self.work, key).run(reported)
        settings: dict[str, Any] = {"tokens": tokens, "recipe": asdict(recipe)}
        if reports:
            settings["held_out"] = reports[-1].to_json()
        ends = PrivateEnds(key, veil, net.changes(), settings)
        save_ends(self.out, ends, self.blueprint, self.cut)
        if not keep:
            shutil.rmtree(self.work)
        return self.out

    def _key(self) -> bytes:
        """The secret, drawn by the operating system once per run; no setting decides it."""
        file = self.work / "key"
        if not file.exists():
            partial = file.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(secrets.token_bytes(KEY_BYTES))
            partial.replace(file)
        return file.read_bytes()

    def _veil(self, data: Conversations, progress: Progress) -> Veil:
        """The mask; what it is computed from is kept, as it takes minutes."""
        file = self.work / "measured.safetensors"
        rows = min(self.recipe.measured_rows, len(data))
        starts = range(0, rows, TOGETHER)
        batches = [data.batch(range(start, min(start + TOGETHER, rows))) for start in starts]
        if not file.exists():
            found = sensitivity(self.teacher, batches, self.recipe.seed, progress)
            write_secret(file, {"sensitivity": found}, {})
        found = load_file(file)["sensitivity"]
        return shape_veil(self.teacher, batches, found, self.recipe.mask)
