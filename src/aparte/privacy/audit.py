"""The audit: every attack on every cut and defence, what the defences cost, and the results as one object.

Cost: the settings say; a quick run takes minutes on two cores, a full one over an hour. Every finished
part is kept, so an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aparte.config import Compute, Cut
from aparte.device import open_writer, wire_format
from aparte.errors import UserError
from aparte.model.parts import Blueprint, Progress
from aparte.privacy import traffic, verdict
from aparte.privacy.attack import Attack, Case
from aparte.privacy.baselines import Frequency, LanguageModelOnly, Uniform
from aparte.privacy.completion import Completion, LogitLens
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Nothing, parse_defence
from aparte.privacy.gradient import Gradient
from aparte.privacy.linear import Linear
from aparte.privacy.metrics import score
from aparte.privacy.mlp import PAPER_SAMPLES, Mlp
from aparte.privacy.observe import Observer, Seen
from aparte.privacy.price import price
from aparte.privacy.private_audit import PrivatePlaces
from aparte.privacy.private_ends import fits
from aparte.privacy.sample import sample_passages
from aparte.privacy.sequence import SequenceInverter
from aparte.privacy.settings import ADAPTIVE_NAMES, ATTACK_NAMES, AuditSettings
from aparte.privacy.shape import ConstantShape, ShapeSettings
from aparte.privacy.specimen import Specimen, bounds_of
from aparte.privacy.store import Store
from aparte.privacy.texts import Passage, cut_to_length, load_passages, split
from aparte.privacy.vocabulary import SOME, Vocabulary
from aparte.target.split import SplitTarget
from aparte.text.tokenizer import Codec

#: Texts that are read to set a defence's clipping, and to measure its price.
CALIBRATION_TEXTS = 12
LEAST_TOKENS = 6


class Audit:
    """One audit of one model."""

    def __init__(
        self, blueprint: Blueprint, settings: AuditSettings, folder: Path, progress: Progress
    ) -> None:
        self._settings = settings
        self._scale = scale = settings.scale
        self._progress = progress
        self._blueprint = blueprint
        self._cuts = _fitting(scale.cuts, blueprint.layers, chosen=bool(settings.cuts))
        self._defences = [
            setting.strip()
            for setting in scale.defences
            if settings.defences or _fits(parse_defence(setting), self._cuts[0], blueprint.layers)
        ]
        for setting, first in self._places():
            for cut in parse_defence(setting).cuts(first):
                cut.check(blueprint.layers)
        self._private = PrivatePlaces(blueprint, self._defences, self._cuts, settings.attacker_ends)
        self._wire = wire_format(settings.wire, blueprint)
        self._codec = Codec(blueprint.checkpoint.folder)
        passages = [p for file in settings.texts for p in load_passages(file)] or sample_passages(
            settings.seed
        )
        self._victims, self._others = split(passages, scale.victims + CALIBRATION_TEXTS, settings.seed)
        self._victims, self._quiet = self._victims[CALIBRATION_TEXTS:], self._victims[:CALIBRATION_TEXTS]
        if not self._victims:
            raise UserError(
                "There is too little text for an audit. Give a --text with a hundred lines or more."
            )
        self._store = Store(folder, self._fingerprint(passages))
        self._specimen: Specimen | None = None
        self._observed: dict[tuple[str, str], Case] = {}

    def run(self) -> dict[str, Any]:
        """All parts; what ``results.json`` holds."""
        started = time.perf_counter()
        attacks = [row for attack in self._plan() for row in attack()]
        defences = self._prices()
        return {
            "model": self._settings.model,
            "layers": self._blueprint.layers,
            "cuts": [str(cut) for cut in self._cuts],
            "wire": self._wire,
            "dtype": self._blueprint.precision.name,
            "seed": self._settings.seed,
            "quick": self._settings.quick,
            "text": [file.name for file in self._settings.texts] or ["the sample that ships"],
            "victims": len(self._victims),
            "seconds": round(time.perf_counter() - started, 1),
            "attacks": attacks,
            "defences": defences,
        }

    # -- what runs where --------------------------------------------------------------------------

    def _plan(self) -> list[Callable[[], list[dict[str, Any]]]]:
        wanted, scale = self._settings.attacks or (*ATTACK_NAMES, *ADAPTIVE_NAMES), self._scale
        first = (self._cuts[0], "none")
        plan: list[Callable[[], list[dict[str, Any]]]] = []

        def add(attack: Attack, cut: Cut, defence: str, tokens: int, label: str = "") -> None:
            if attack.name in wanted:
                plan.append(lambda: [self._attack(attack, cut, defence, tokens, label)])

        for baseline in (Uniform(), Frequency(), LanguageModelOnly()):
            add(baseline, *first, scale.attacker_tokens)
        for defence, cut in self._places():
            here = (cut, defence)
            add(
                Vocabulary(scale.doubtful, SOME if self._private.opened(defence, cut) else ()),
                *here,
                scale.attacker_tokens,
            )
            add(Linear(), *here, min(scale.attacker_tokens, scale.linear_tokens))
            for attack in (Completion(), LogitLens()):
                add(attack, *here, 0)
            plain, main = defence == "none", cut == self._cuts[0]
            mlp = Mlp(scale.seconds)
            if scale.thorough or plain:
                add(mlp, *here, min(PAPER_SAMPLES, scale.attacker_tokens), "paper")
            if (plain and main) or (scale.thorough and (plain or main)):
                if scale.attacker_tokens > PAPER_SAMPLES:
                    add(mlp, *here, scale.attacker_tokens)
                add(SequenceInverter(scale.seconds), *here, scale.attacker_tokens)
            if plain and (main or scale.thorough):
                add(Gradient(scale.seconds, scale.steps, scale.descents), *here, 0)
            for hard in self._private.attacks(defence, scale):
                if hard.name.split("_")[0] in wanted:
                    plan.append(partial(self._listed, hard, *here, 0, f"{hard.leaked} {hard.target}"))
        if "traffic" in wanted:
            plan.append(lambda: [self._traffic(None), self._traffic(traffic.SHAPE)])
        return plan

    def _listed(
        self, attack: Attack, cut: Cut, defence: str, tokens: int, label: str
    ) -> list[dict[str, Any]]:
        return [self._attack(attack, cut, defence, tokens, label)]

    def _attack(self, attack: Attack, cut: Cut, defence: str, tokens: int, label: str) -> dict[str, Any]:
        key = f"{attack.name} {cut} {defence} {tokens} {label}"
        return dict(self._store.part(key, lambda: self._attacked(attack, cut, defence, tokens)))

    def _attacked(self, attack: Attack, cut: Cut, defence: str, tokens: int) -> dict[str, Any]:
        case = self._case(cut, defence, answers=attack.target == "answer")
        case.tokens = tokens
        found = attack.run(case)
        victims = case.victims[: len(found.guesses)]
        truths = [seen.answer if attack.target == "answer" else seen.tokens for seen in victims]
        entities = [p.entities for p in self._victims] if attack.target == "prompt" else []
        scores = score(found.guesses, truths, self._codec.decode, entities[: len(victims)])
        return {
            "name": attack.name,
            "cut": str(cut),
            "defence": defence,
            "target": attack.target,
            **scores.to_json(),
            **self._private.identity(defence),
            "attacker_tokens": found.attacker_tokens,
            "seconds": round(found.seconds, 2),
            **found.extra,
        }

    def _traffic(self, shape: ShapeSettings | None) -> dict[str, Any]:
        scale, cut = self._scale, self._cuts[0]
        texts = [*self._victims, *self._others]
        random.Random(f"{self._settings.seed} traffic").shuffle(texts)
        prompts = [self._codec.encode(p.text)[: 4 * scale.length] for p in texts[: scale.traffic_prompts]]
        options = traffic.TrafficSettings(scale.traffic_tokens)

        def measure() -> dict[str, Any]:
            writer = open_writer(
                self._blueprint, self._settings.model, cut, wire=self._settings.wire, progress=self._progress
            )
            try:
                if shape is not None and isinstance(writer.target, SplitTarget):
                    filling = random.Random(f"{self._settings.seed} filling")
                    context = writer.target.max_context
                    writer.target.protect(shape=ConstantShape(shape, context, draw=filling))
                return traffic.identify(writer, prompts, options, self._settings.seed, self._progress)
            finally:
                writer.target.close()

        defence = "none" if shape is None else f"constant-shape:{shape.nodes}"
        row = self._store.part(f"traffic {cut} {defence}", measure)
        nothing = {"rouge_l": None, "pii_recall": None, "target": "which prompt"}
        return {"name": traffic.NAME, "cut": str(cut), "defence": defence, **nothing, **row}

    def _places(self) -> list[tuple[str, Cut]]:
        """Which defence is audited at which cut; one that draws its fronts itself, at the first only."""
        return [
            (setting, cut)
            for setting in self._defences
            for cut in self._cuts
            if (cut == self._cuts[0] or len(parse_defence(setting).cuts(cut)) == 1)
            and fits(parse_defence(setting), cut)
        ]

    def _prices(self) -> list[dict[str, Any]]:
        return [
            self._store.part(f"price {cut} {setting}", partial(self._price, cut, setting))
            for setting, cut in self._places()
        ]

    def _price(self, cut: Cut, setting: str) -> dict[str, Any]:
        texts = self._tokens(self._others, self._scale.length)[: self._scale.price_texts]
        defence = self._defence(cut, setting)
        device = self._private.device(self.specimen, setting, cut)
        row = price(
            self.specimen, cut, self._wire, defence, texts, self._settings.seed, self._progress, device
        )
        if setting == "none":
            row["name"] = "depth"
            row["setting"] = f"none at {cut}"
        return row

    # -- what they are given ----------------------------------------------------------------------

    @property
    def specimen(self) -> Specimen:
        """The model, loaded when the first part needs it."""
        if self._specimen is None:
            drawn = [cut for setting, first in self._places() for cut in parse_defence(setting).cuts(first)]
            bounds = bounds_of([*self._cuts, *drawn], self._blueprint.layers)
            self._specimen = Specimen(self._blueprint, bounds, self._progress)
        return self._specimen

    def _case(self, cut: Cut, setting: str, answers: bool) -> Case:
        key = (f"{cut} {setting}", "answer" if answers else "prompt")
        if key not in self._observed:
            # The pairs of one case can be large; nothing comes back to an earlier one.
            self._observed = {other: case for other, case in self._observed.items() if other[0] == key[0]}
            device = self._private.device(self.specimen, setting, cut)
            observer = Observer(
                self.specimen, cut, self._wire, self._defence(cut, setting), self._settings.seed, device
            )
            scale = self._scale
            if answers:
                texts = self._tokens(self._victims, scale.length)[: scale.conversations]
                seen = observer.watch(texts, answer=scale.answer, label="answers", progress=self._progress)
            else:
                seen = self._watched(observer)
            corpus = self._tokens(self._others, 4 * scale.length)
            case = Case(observer, seen, corpus, scale.attacker_tokens, self._progress, self._settings.seed)
            self._observed[key] = self._private.case(case)
        return self._observed[key]

    def _watched(self, observer: Observer) -> list[Seen]:
        texts = [self._codec.encode(p.text)[: self._scale.length] for p in self._victims]
        return observer.watch(texts, label="texts to attack", progress=self._progress)

    def _defence(self, cut: Cut, setting: str) -> Defence:
        defence = self._private.opened(setting, cut) or parse_defence(setting)
        plain = Observer(self.specimen, cut, "float32", Nothing(), self._settings.seed)
        rows = plain.watch(self._tokens(self._quiet, 4 * self._scale.length))
        defence.calibrate(
            torch.cat([seen.up[1:] for seen in rows]), torch.cat([seen.up[:1] for seen in rows])
        )
        return defence

    def _tokens(self, passages: Sequence[Passage], most: int) -> list[list[int]]:
        return cut_to_length([self._codec.encode(p.text) for p in passages], LEAST_TOKENS, most)

    def _fingerprint(self, passages: Sequence[Passage]) -> dict[str, Any]:
        digest = hashlib.sha256("\0".join(passage.text for passage in passages).encode()).hexdigest()
        settings = self._settings
        return {
            "model": settings.model,
            "cuts": [str(cut) for cut in self._cuts],
            "defences": self._defences,
            **self._private.fingerprint(),
            "attacker_tokens": self._scale.attacker_tokens,
            "text": digest[:16],
            "quick": settings.quick,
            "seed": settings.seed,
            "wire": self._wire,
            "dtype": self._blueprint.precision.name,
        }


def run_audit(
    folder: Path, settings: AuditSettings, compute: Compute, out: Path, progress: Progress
) -> dict[str, Any]:
    """Audit the model in ``folder``; finished parts are kept in ``out``."""
    blueprint = Blueprint.open(folder, compute)
    with torch.no_grad():
        results = Audit(blueprint, settings, out, progress).run()
    verdict.keep(blueprint, results)
    return results


def _fitting(cuts: Sequence[str], layers: int, chosen: bool) -> list[Cut]:
    """The cuts; of those that nobody chose only the ones that the model is deep enough for."""
    parsed = [Cut.parse(cut) for cut in cuts]
    if not chosen:
        parsed = [cut for cut in parsed if cut.front + cut.back < layers] or [Cut(1, 1)]
    for cut in parsed:
        cut.check(layers)
    return list(dict.fromkeys(parsed))


def _fits(defence: Defence, cut: Cut, layers: int) -> bool:
    return all(other.front + other.back < layers for other in defence.cuts(cut))
