"""The audit: every attack on every cut and defence, what the defences cost, and the results as one object.

Cost: the settings say; a quick run takes minutes on two cores, a full one over an hour. Every finished
part is kept, so an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aparte.config import Compute, Cut
from aparte.device import open_writer, wire_format
from aparte.errors import UserError
from aparte.model.parts import Blueprint, Progress
from aparte.privacy import traffic, verdict
from aparte.privacy.attack import ALL, Attack, Recovered
from aparte.privacy.baselines import Frequency, LanguageModelOnly, Uniform
from aparte.privacy.completion import Completion, LogitLens
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Noise, parse_defence
from aparte.privacy.estimate import Estimate
from aparte.privacy.gradient import Gradient
from aparte.privacy.linear import Linear
from aparte.privacy.material import Material
from aparte.privacy.metrics import score
from aparte.privacy.mlp import PAPER_SAMPLES, Mlp
from aparte.privacy.price import price
from aparte.privacy.private_audit import PrivatePlaces
from aparte.privacy.private_ends import PrivateEndsDefence, fits
from aparte.privacy.questions import answers, load_questions, unchanged
from aparte.privacy.sample import sample_passages
from aparte.privacy.sequence import SequenceInverter
from aparte.privacy.settings import ADAPTIVE_NAMES, ATTACK_NAMES, AuditSettings
from aparte.privacy.shape import ConstantShape, ShapeSettings
from aparte.privacy.store import Store
from aparte.privacy.texts import Passage, load_passages
from aparte.privacy.vocabulary import SOME, Vocabulary
from aparte.target.split import SplitTarget

#: The turn of what takes long.
LAST = 2

Rows = list[dict[str, Any]]
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A piece of the audit that is kept once it is finished. ``seconds`` is an estimate.

    Parts go by their ``turn``: an audit that is interrupted has the quick ones of every cut and defence.
    """

    key: str
    seconds: float
    make: Callable[[], Rows]
    turn: int = 0


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
        passages = [p for file in settings.texts for p in load_passages(file)] or sample_passages(
            settings.seed
        )
        questions = load_questions(settings.questions) if settings.questions else []
        self._private = PrivatePlaces(blueprint, self._defences, self._cuts, settings.attacker_ends)
        wire = wire_format(settings.wire, blueprint)
        self._material = Material(
            blueprint, settings, wire, passages, questions, self._places(), progress, self._private
        )
        self._plain: dict[Cut, list[torch.Tensor]] = {}
        self._store = Store(folder, self._fingerprint(passages, [question.text for question in questions]))

    def run(self, notice: Notice = lambda sentence: None, *, finished_only: bool = False) -> dict[str, Any]:
        """All parts; what ``results.json`` holds. ``notice`` is told how long it will take.

        With ``finished_only`` nothing is attacked: only what earlier runs finished is put together.
        """
        if finished_only:
            estimate = Estimate(0.0, self._blueprint.layers, self._scale)
        else:
            estimate = Estimate.measure(self._material.specimen, self._scale)
        attacks, prices = self._attacks(estimate), self._prices(estimate)
        left = [part for part in (*attacks, *prices) if part.key not in self._store]
        finished = len(attacks) + len(prices) - len(left)
        if finished_only:
            if not finished:
                raise UserError("No part of this audit is finished. Start it without --finished-only.")
            attacks, prices = ([part for part in mine if part not in left] for mine in (attacks, prices))
        else:
            minutes = round(sum(part.seconds for part in left) / 60)
            notice(
                f"{len(left)} parts, about {max(1, minutes)} minutes on this machine as it is now"
                + (f"; {finished} parts are finished." if finished else ".")
            )
        done = {
            part.key: self._store.part(part.key, part.make)
            for part in sorted((*attacks, *prices), key=lambda part: part.turn)
        }
        return {
            "model": self._settings.model,
            "layers": self._blueprint.layers,
            "cuts": [str(cut) for cut in self._cuts],
            "wire": self._material.wire,
            "dtype": self._blueprint.precision.name,
            "seed": self._settings.seed,
            "quick": self._settings.quick,
            "text": [file.name for file in self._settings.texts] or ["the sample that ships"],
            "questions": self._settings.questions.name if self._settings.questions else None,
            "victims": len(self._material.victims),
            "seconds": round(self._store.seconds, 1),
            "unfinished": len(left) if finished_only else 0,
            "attacks": [row for part in attacks for row in done[part.key]],
            "defences": [row for part in prices for row in done[part.key]],
        }

    # -- what runs where --------------------------------------------------------------------------

    def _attacks(self, estimate: Estimate) -> list[Part]:
        wanted = self._settings.attacks or (*ATTACK_NAMES, *ADAPTIVE_NAMES)
        scale, first = self._scale, self._cuts[0]
        parts: list[Part] = []

        def add(attack: Attack, cut: Cut, defence: str, tokens: int, turn: int = 0) -> None:
            if attack.name in wanted:
                doubtful = isinstance(parse_defence(defence), Noise) or defence in ("int2", "int3")
                seconds = estimate.attack(attack.name, cut, tokens, doubtful=doubtful)
                key = f"{attack.name} {cut} {defence} {tokens}"
                make = partial(self._attack, attack, cut, defence, tokens)
                if key not in {part.key for part in parts}:
                    parts.append(Part(key, seconds, make, turn))

        for baseline in (Uniform(), Frequency(), LanguageModelOnly()):
            add(baseline, first, "none", scale.learned_tokens)
        for defence, cut in self._places():
            here = (cut, defence)
            widths = SOME if self._private.opened(defence, cut) else ()
            add(Vocabulary(scale.doubtful, widths), *here, scale.learned_tokens)
            add(Linear(), *here, min(scale.learned_tokens, scale.linear_tokens))
            for attack in (Completion(), LogitLens()):
                add(attack, *here, 0)
            if scale.thorough or defence == "none":
                add(Mlp(scale.seconds), *here, min(PAPER_SAMPLES, scale.learned_tokens))
        for defence, cut in self._places():
            here, plain, main = (cut, defence), defence == "none", cut == first
            if (plain and main) or (scale.thorough and (plain or main)):
                for size in scale.sizes if plain else (scale.learned_tokens,):
                    if size <= scale.learned_tokens:
                        add(Mlp(scale.limit(size)), *here, size, turn=LAST)
                add(SequenceInverter(scale.seconds), *here, scale.learned_tokens, turn=LAST)
            if plain and (main or scale.thorough):
                add(Gradient(scale.seconds, scale.steps, scale.descents), *here, 0, turn=LAST)
        if Mlp.name in wanted and "none" in self._defences and len(self._material.domains) > 1:
            parts += self._transfers(estimate)
        if "none" in self._defences and scale.attacker_tokens > scale.learned_tokens:
            add(Mlp(scale.limit(scale.attacker_tokens)), first, "none", scale.attacker_tokens, turn=LAST)
        for defence, cut in self._places():
            for prepared in self._private.attacks(defence, scale):
                if prepared.name.split("_")[0] in wanted:
                    key = f"{prepared.name} {prepared.target} {cut} {defence} {prepared.leaked} leaked"
                    seconds = estimate.attack(Vocabulary.name, cut, prepared.leaked, doubtful=True)
                    make = partial(self._attack, prepared, cut, defence, 0)
                    parts.append(Part(key, seconds, make, LAST))
        if traffic.NAME in wanted:
            for shape in (None, traffic.SHAPE):
                parts.append(self._traffic(shape, estimate.traffic()))
        return parts

    def _attack(self, attack: Attack, cut: Cut, defence: str, tokens: int) -> Rows:
        answer = attack.target == "answer"
        case = self._material.case(cut, defence, answers=answer)
        case.tokens = tokens
        return [self._row(attack, cut, defence, attack.run(case), ALL, ALL)]

    def _transfers(self, estimate: Estimate) -> list[Part]:
        """The MLP on text of one domain, tested on each: in and out of domain."""
        cut = self._cuts[0]
        return [
            Part(
                f"mlp {cut} none {tokens} of {domain}",
                estimate.attack(Mlp.name, cut, tokens),
                partial(self._transfer, cut, domain, tokens),
                turn=LAST,
            )
            for domain in self._material.domains
            for tokens in self._scale.domain_tokens
        ]

    def _transfer(self, cut: Cut, domain: str, tokens: int) -> Rows:
        case = self._material.case(cut, "none", domain=domain)
        case.tokens = tokens
        attack = Mlp(self._scale.limit(tokens))
        found = attack.run(case)
        return [self._row(attack, cut, "none", found, domain, other) for other in self._material.domains]

    def _row(
        self, attack: Attack, cut: Cut, defence: str, found: Recovered, trained_on: str, tested_on: str
    ) -> dict[str, Any]:
        """The figures of an attack on texts of one domain, or of all."""
        answer = attack.target == "answer"
        domains = [p.domain for p in self._material.victims[: len(found.guesses)]]
        chosen = [index for index, domain in enumerate(domains) if tested_on in (ALL, domain)]
        if answer:
            chosen = list(range(len(found.guesses)))
        victims = self._material.case(
            cut, defence, answers=answer, domain="" if trained_on == ALL else trained_on
        ).victims
        truths = [victims[index].answer if answer else victims[index].tokens for index in chosen]
        entities = [] if answer else [self._material.victims[index].entities for index in chosen]
        scores = score(
            [found.guesses[index] for index in chosen], truths, self._material.codec.decode, entities
        )
        return {
            "name": attack.name,
            "cut": str(cut),
            "defence": defence,
            "target": attack.target,
            "trained_on": trained_on,
            "tested_on": tested_on,
            **scores.to_json(),
            **self._private.identity(defence),
            "attacker_tokens": found.attacker_tokens,
            "seconds": round(found.seconds, 2),
            **found.extra,
        }

    def _traffic(self, shape: ShapeSettings | None, seconds: float) -> Part:
        defence = "none" if shape is None else f"constant-shape:{shape.nodes}"
        cut = self._cuts[0]
        nothing = {"rouge_l": None, "pii_recall": None, "target": "which prompt"}

        def make() -> Rows:
            row = self._told(cut, shape)
            return [{"name": traffic.NAME, "cut": str(cut), "defence": defence, **nothing, **row}]

        return Part(f"traffic {cut} {defence}", seconds, make, turn=1)

    def _told(self, cut: Cut, shape: ShapeSettings | None) -> dict[str, Any]:
        scale, material = self._scale, self._material
        texts = [*material.victims, *material.others]
        random.Random(f"{self._settings.seed} traffic").shuffle(texts)
        prompts = [material.codec.encode(p.text)[: 4 * scale.length] for p in texts[: scale.traffic_prompts]]
        options = traffic.TrafficSettings(scale.traffic_tokens)
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

    def _places(self) -> list[tuple[str, Cut]]:
        """Which defence is audited at which cut: none at all of them, others at the first and the last.

        At the first only go those that draw their fronts themselves, and all of them in a quick audit.
        """
        ends = (self._cuts[0], self._cuts[-1] if self._scale.thorough else self._cuts[0])
        return [
            (setting, cut)
            for setting in self._defences
            for cut in self._cuts
            if setting == "none"
            or (self._own(setting) and fits(parse_defence(setting), cut))
            or (not self._own(setting) and cut == ends[0])
            or (not self._own(setting) and cut == ends[1] and len(parse_defence(setting).cuts(cut)) == 1)
        ]

    @staticmethod
    def _own(setting: str) -> bool:
        """Whether private ends are meant, which have a cut of their own."""
        return isinstance(parse_defence(setting), PrivateEndsDefence)

    def _prices(self, estimate: Estimate) -> list[Part]:
        seconds = estimate.price()
        return [
            Part(f"price {cut} {setting}", seconds, partial(self._price, cut, setting), turn=1)
            for setting, cut in self._places()
        ]

    def _price(self, cut: Cut, setting: str) -> Rows:
        scale, material, seed = self._scale, self._material, self._settings.seed
        texts = material.tokens(material.others, scale.length)[: scale.price_texts]
        defence = material.defence(cut, setting)
        device = self._private.device(material.specimen, setting, cut)
        row = price(material.specimen, cut, material.wire, defence, texts, seed, self._progress, device)
        row |= unchanged(self._answers(cut, "none"), self._answers(cut, setting))
        if setting == "none":
            row["name"] = "depth"
            row["setting"] = f"none at {cut}"
        return [row]

    def _answers(self, cut: Cut, setting: str) -> list[torch.Tensor]:
        """To the questions, if there are any. Those of the undefended device are needed again."""
        if setting == "none" and cut in self._plain:
            return self._plain[cut]
        material, length = self._material, self._scale.question_tokens
        observer = material.observer(cut, setting)
        found = answers(observer, material.questions, length, self._progress) if material.questions else []
        if setting == "none":
            self._plain[cut] = found
        return found

    def _fingerprint(self, passages: Sequence[Passage], questions: Sequence[str]) -> dict[str, Any]:
        everything = "\0".join([*(passage.text for passage in passages), *questions])
        settings = self._settings
        return {
            "model": settings.model,
            "cuts": [str(cut) for cut in self._cuts],
            "defences": self._defences,
            **self._private.fingerprint(),
            "attacker_tokens": self._scale.attacker_tokens,
            "text": hashlib.sha256(everything.encode()).hexdigest()[:16],
            "quick": settings.quick,
            "seed": settings.seed,
            "wire": self._material.wire,
            "dtype": self._blueprint.precision.name,
        }


def run_audit(
    folder: Path,
    settings: AuditSettings,
    compute: Compute,
    out: Path,
    progress: Progress,
    notice: Notice = lambda sentence: None,
    *,
    finished_only: bool = False,
) -> dict[str, Any]:
    """Audit the model in ``folder``; finished parts are kept in ``out``."""
    blueprint = Blueprint.open(folder, compute)
    with torch.no_grad():
        results = Audit(blueprint, settings, out, progress).run(notice, finished_only=finished_only)
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
