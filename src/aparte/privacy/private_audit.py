"""What an audit does differently where private ends are audited: whose layers run, and who attacks.

Those with the public weights get a public device to prepare on, and sessions of the private one to attack.
The adaptive ones (:mod:`aparte.privacy.adaptive`) get private ends of their own, or pairs of the private
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aparte.config import Cut
from aparte.errors import UserError
from aparte.model.parts import Blueprint
from aparte.privacy.adaptive import LEAKS, Adaptive, Leaked
from aparte.privacy.attack import Case
from aparte.privacy.defences import Nothing, parse_defence
from aparte.privacy.linear import Linear
from aparte.privacy.mlp import Mlp
from aparte.privacy.observe import Observer
from aparte.privacy.private_ends import PREFIX, PrivateEndsDefence, fits
from aparte.privacy.settings import Scale
from aparte.privacy.specimen import Specimen


class PrivatePlaces:
    """The private ends among the defences of one audit, and those of the attacker."""

    def __init__(
        self, blueprint: Blueprint, settings: Sequence[str], cuts: Sequence[Cut], attackers: Path | None
    ) -> None:
        """Raises :class:`UserError` if one of them is of another model, or of none of the ``cuts``."""
        self._blueprint = blueprint
        self._defences: dict[str, PrivateEndsDefence] = {}
        self._devices: dict[str, Specimen] = {}
        for setting in settings:
            defence = parse_defence(setting)
            if isinstance(defence, PrivateEndsDefence):
                cut = defence.trained_for()
                if cut not in cuts:
                    raise UserError(
                        f"The private ends in {defence.file} are for cut {cut}, which is not audited. Add it "
                        f"to the cuts: --cuts '{cut}'."
                    )
                defence.open(blueprint, cut)
                self._defences[setting] = defence
        if attackers is not None and not self._defences:
            raise UserError(
                "An attacker's own private ends are of no use where none are attacked. Add some: --defences "
                f"{PREFIX}FILE."
            )
        self._attackers: PrivateEndsDefence | None = None
        if attackers is not None:
            self._attackers = PrivateEndsDefence(attackers)
            self._attackers.open(blueprint, self._attackers.trained_for())
            keys = {defence.ends.key for defence in self._defences.values() if defence.ends}
            if self._attackers.ends and self._attackers.ends.key in keys:
                raise UserError(
                    f"{attackers} is under audit itself. An attacker does not have it: train it private ends "
                    "of its own."
                )

    def opened(self, setting: str, cut: Cut) -> PrivateEndsDefence | None:
        """The defence that is ``setting``, if that is private ends."""
        defence = self._defences.get(setting)
        return defence if defence is not None and fits(defence, cut) else None

    def device(self, specimen: Specimen, setting: str, cut: Cut) -> Specimen | None:
        """The device with these private ends; None where its layers are public."""
        defence = self.opened(setting, cut)
        return None if defence is None else self._device(specimen, defence, cut)

    def case(self, case: Case) -> Case:
        """``case`` as the attackers have it, if what they attack has private ends."""
        private = case.observer
        if private.device is None:
            return case
        specimen, cut = private.specimen, private.cut
        own = None
        if self._attackers is not None and fits(self._attackers, cut):
            device = self._device(specimen, self._attackers, cut)
            own = Observer(specimen, cut, private.wire, self._attackers, private.seed + 3_000_017, device)
        public = Observer(specimen, cut, private.wire, Nothing(), private.seed)
        return replace(case, observer=public, device=private, own=own)

    def attacks(self, setting: str, scale: Scale) -> list[Adaptive | Leaked]:
        """The adaptive attackers of ``setting``, if that is private ends."""
        if setting not in self._defences:
            return []
        leaks = [leak for leak in LEAKS if leak <= scale.learned_tokens]
        matching = [*([0] if self._attackers else []), *leaks]
        attacks: list[Adaptive | Leaked] = [Adaptive(leak, scale.doubtful) for leak in matching]
        attacks.append(Adaptive(matching[-1], scale.doubtful, "answer"))
        for leak in leaks:
            attacks += [Leaked(Linear(), leak), Leaked(Mlp(scale.seconds), leak)]
        return attacks

    def identity(self, setting: str) -> dict[str, str]:
        """Fields of a row of results by which a device knows that its own private ends are meant."""
        defence = self._defences.get(setting)
        return {} if defence is None or defence.ends is None else {"ends": defence.ends.setting}

    def fingerprint(self) -> dict[str, Any]:
        """What distinguishes audits of different files under one name."""
        found = [*self._defences.values(), *([self._attackers] if self._attackers else [])]
        digests = [defence.ends.digest for defence in found if defence.ends]
        return {"private_ends": digests} if digests else {}

    def _device(self, specimen: Specimen, defence: PrivateEndsDefence, cut: Cut) -> Specimen:
        key = f"{defence.setting} {cut}"
        if key not in self._devices:
            self._devices[key] = specimen.changed(defence.open(self._blueprint, cut).change, cut)
        return self._devices[key]
