"""What the parts of an audit work on: texts and their split, the loaded model, and cases for attacks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from aparte.config import Cut
from aparte.errors import UserError
from aparte.model.parts import Blueprint, Progress
from aparte.privacy.attack import Case
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Nothing, parse_defence
from aparte.privacy.observe import Observer, Seen
from aparte.privacy.private_audit import PrivatePlaces
from aparte.privacy.questions import Question, pick
from aparte.privacy.settings import AuditSettings
from aparte.privacy.specimen import Specimen, bounds_of
from aparte.privacy.texts import Passage, cut_to_length, domains_of, split, windows
from aparte.text.tokenizer import Codec

#: Texts that are read to set a defence's clipping.
CALIBRATION_TEXTS = 12
LEAST_TOKENS = 6


class Material:
    """Texts to attack, texts for attackers, and the model that both go through."""

    def __init__(
        self,
        blueprint: Blueprint,
        settings: AuditSettings,
        wire: str,
        passages: Sequence[Passage],
        questions: Sequence[Question],
        places: Sequence[tuple[str, Cut]],
        progress: Progress,
        private: PrivatePlaces,
    ) -> None:
        """``places`` are the defences and cuts that will be asked for; ``private`` are private ends among
        them."""
        self._private = private
        self.wire = wire
        self.codec = Codec(blueprint.checkpoint.folder)
        self.domains = domains_of(passages)
        self._blueprint = blueprint
        self._settings = settings
        self._scale = settings.scale
        self._places = places
        self._progress = progress
        quiet_and_victims, self.others = split(
            passages, self._scale.victims + CALIBRATION_TEXTS, settings.seed
        )
        self._quiet = quiet_and_victims[:CALIBRATION_TEXTS]
        self.victims = quiet_and_victims[CALIBRATION_TEXTS:]
        if not self.victims:
            raise UserError(
                "There is too little text for an audit. Give a --text with a hundred lines or more."
            )
        self.questions = pick(questions, self.codec, self._scale.questions, settings.seed)
        self._observed: dict[tuple[str, str], Case] = {}

    @cached_property
    def specimen(self) -> Specimen:
        """The model, loaded when the first part needs it."""
        drawn = [cut for setting, first in self._places for cut in parse_defence(setting).cuts(first)]
        bounds = bounds_of([*(cut for _, cut in self._places), *drawn], self._blueprint.layers)
        return Specimen(self._blueprint, bounds, self._progress)

    def observer(self, cut: Cut, setting: str) -> Observer:
        """The device with a defence at a cut."""
        device = self._private.device(self.specimen, setting, cut)
        return Observer(
            self.specimen, cut, self.wire, self.defence(cut, setting), self._settings.seed, device
        )

    def case(self, cut: Cut, setting: str, *, answers: bool = False, domain: str = "") -> Case:
        """What an attack is given. With ``domain`` the attacker has text of that domain alone."""
        key = (f"{cut} {setting} {domain}", "answer" if answers else "prompt")
        if key not in self._observed:
            # The pairs of one case can be large; nothing comes back to an earlier one.
            self._observed = {other: case for other, case in self._observed.items() if other[0] == key[0]}
            observer, scale = self.observer(cut, setting), self._scale
            if answers:
                texts = self.tokens(self.victims, scale.length)[: scale.conversations]
                seen = observer.watch(texts, answer=scale.answer, label="answers", progress=self._progress)
            else:
                seen = self._watched(observer)
            case = Case(
                observer,
                seen,
                self._corpora.get(domain, self._corpus),
                scale.attacker_tokens,
                self._progress,
                self._settings.seed,
            )
            self._observed[key] = self._private.case(case)
        return self._observed[key]

    def tokens(self, passages: Sequence[Passage], most: int) -> list[list[int]]:
        """Texts of some tokens at least, cut at ``most``."""
        return cut_to_length([self.codec.encode(p.text) for p in passages], LEAST_TOKENS, most)

    def available(self, domain: str = "") -> int:
        """Tokens that attackers have, of a domain or of all."""
        return sum(map(len, self._corpora.get(domain, self._corpus)))

    def defence(self, cut: Cut, setting: str) -> Defence:
        """The defence, calibrated at the cut."""
        defence = self._private.opened(setting, cut) or parse_defence(setting)
        plain = Observer(self.specimen, cut, "float32", Nothing(), self._settings.seed)
        rows = plain.watch(self.tokens(self._quiet, 4 * self._scale.length))
        defence.calibrate(
            torch.cat([seen.up[1:] for seen in rows]), torch.cat([seen.up[:1] for seen in rows])
        )
        return defence

    @cached_property
    def _encoded(self) -> list[tuple[str, list[int]]]:
        self._progress("reading the attackers' text", 0, 1)
        return [(passage.domain, self.codec.encode(passage.text)) for passage in self.others]

    @cached_property
    def _corpus(self) -> list[list[int]]:
        return windows([tokens for _, tokens in self._encoded], LEAST_TOKENS, 4 * self._scale.length)

    @cached_property
    def _corpora(self) -> dict[str, list[list[int]]]:
        return {
            domain: windows(
                [tokens for mine, tokens in self._encoded if mine == domain],
                LEAST_TOKENS,
                4 * self._scale.length,
            )
            for domain in self.domains
        }

    def _watched(self, observer: Observer) -> list[Seen]:
        texts = [self.codec.encode(p.text)[: self._scale.length] for p in self.victims]
        return observer.watch(texts, label="texts to attack", progress=self._progress)
