"""What audits on this machine found, by model and cut: for the line that the commands begin with.

A small file per model and cut lies in the cache folder. It holds shares of recovered tokens and the names of
attacks; no text, and nothing of what was attacked. Of several audits the worst finding counts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aparte.config import Cut, cache_dir
from aparte.model.fingerprint import CONFIG_KEYS
from aparte.model.parts import Blueprint
from aparte.privacy.baselines import Frequency, LanguageModelOnly, Uniform

#: What attacks are after.
TARGETS = ("prompt", "answer")
_BASELINES = (Uniform.name, Frequency.name, LanguageModelOnly.name)


@dataclass(frozen=True)
class Verdict:
    """Shares of the tokens of prompt and answer that the best attack recovered; None if none was tried."""

    prompt: float | None = None
    answer: float | None = None

    def sentence(self, setting: str) -> str:
        """For people; ``setting`` is the defence that was on."""
        under = "" if setting == "none" else f", with {setting},"
        return (
            f"The cloud receives hidden states, never text. From those of this model at this cut{under} "
            f"`aparte audit` recovered {self._shares}, in tokens: see docs/privacy.md."
        )

    def sentence_of_ends(self) -> str:
        """The same for a device with private ends."""
        return (
            f"private ends: the best attack of `aparte audit` recovered {self._shares}, in tokens: see "
            "docs/privacy.md."
        )

    @property
    def _shares(self) -> str:
        return " and ".join(
            f"{100 * share:.1f} % of the {target}"
            for target, share in zip(TARGETS, (self.prompt, self.answer), strict=True)
            if share is not None
        )


def recall(blueprint: Blueprint, cut: Cut, setting: str = "none") -> Verdict | None:
    """What audits found for this model, cut and defence; None if there was no such audit."""
    found = _load(_file(blueprint, cut)).get(setting, {})
    verdict = Verdict(*(found.get(target) for target in TARGETS))
    return None if verdict == Verdict() else verdict


def keep(blueprint: Blueprint, results: dict[str, Any]) -> None:
    """Remember what ``results`` (as in ``results.json``) say. A folder that cannot be written is no error."""
    for cut in {row["cut"] for row in results["attacks"]}:
        file = _file(blueprint, Cut.parse(cut))
        if file is None:
            continue
        found = _load(file)
        for row in results["attacks"]:
            target, name = row.get("target"), row["name"]
            if row["cut"] != cut or target not in TARGETS or name in _BASELINES:
                continue
            mine = found.setdefault(row.get("ends") or row["defence"], {})
            mine[target] = max(mine.get(target, 0.0), float(row["top1"]))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_suffix(".tmp")
            beside.write_text(json.dumps(found), encoding="utf-8")
            beside.replace(file)
        except OSError:
            return


def _load(file: Path | None) -> dict[str, dict[str, float]]:
    """Shares by defence and target; a file that is damaged is as good as none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8")) if file else {}
        return {
            str(setting): {
                target: float(found[target])
                for target in TARGETS
                if target in found and 0 <= float(found[target]) <= 1
            }
            for setting, found in data.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _file(blueprint: Blueprint, cut: Cut) -> Path | None:
    """Named by the architecture, the cut and the weights of both ends, which decide what can be read.

    None if the ends are not on this machine.
    """
    cut.check(blueprint.layers)
    middle = set(blueprint.middle_names(cut))
    sample = blueprint.checkpoint.sample(name for name in blueprint.all_names() if name not in middle)
    if sample is None:
        return None
    values = [str(getattr(blueprint.config, key, None)) for key in CONFIG_KEYS]
    digest = hashlib.sha256(json.dumps([values, str(cut), sample.hex()]).encode()).hexdigest()
    return cache_dir() / "audits" / f"{digest[:32]}.json"
