"""Estimates: they follow the work, and training never takes longer than it may."""

from __future__ import annotations

from aparte.config import Cut
from aparte.privacy.estimate import Estimate
from aparte.privacy.settings import Scale
from aparte.privacy.specimen import Specimen

SCALE = Scale()
ESTIMATE = Estimate(1e-4, 30, SCALE)


def test_a_pass_is_measured(specimen: Specimen) -> None:
    estimate = Estimate.measure(specimen, SCALE)
    assert 0 < estimate.unit_s < 0.01
    assert estimate.layers == specimen.layers


def test_deeper_cuts_and_more_text_take_longer() -> None:
    for name in ("vocabulary", "linear", "mlp"):
        shallow, deep, more = (
            ESTIMATE.attack(name, cut, tokens)
            for cut, tokens in ((Cut(2, 2), 1000), (Cut(8, 8), 1000), (Cut(8, 8), 10_000))
        )
        assert shallow < deep < more
    assert ESTIMATE.attack("vocabulary", Cut(8, 8), 1000, doubtful=True) > 0


def test_training_has_a_limit() -> None:
    million = ESTIMATE.attack("mlp", Cut(2, 2), 1_000_000)
    assert million == ESTIMATE.passes(1_000_000, 2) + SCALE.limit(1_000_000)
    assert ESTIMATE.attack("gradient", Cut(8, 8), 0) <= SCALE.seconds


def test_a_slower_machine_takes_longer() -> None:
    slow = Estimate(1e-3, 30, SCALE)
    assert slow.traffic() > ESTIMATE.traffic() > 0
    assert slow.price() > ESTIMATE.price() > 0
