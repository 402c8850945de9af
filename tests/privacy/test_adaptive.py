"""Attackers who know private ends and prepare for them: what they learn, and that it is enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aparte.privacy.adaptive import Adaptive, Leaked, Simulated, fit
from aparte.privacy.attack import Case, Recovered
from aparte.privacy.defences import Nothing
from aparte.privacy.linear import Linear
from aparte.privacy.observe import Observer
from aparte.privacy.private_ends import PrivateEndsDefence
from aparte.privacy.specimen import Specimen
from aparte.privacy.vocabulary import SOME, Vocabulary
from aparte.privatize.ends import PrivateEnds, Veil
from privacy.conftest import CUT, random_texts

WIDTH = 32


def defence_of(specimen: Specimen, size: int, key: int = 1) -> PrivateEndsDefence:
    """Decoys in ``size`` of the 32 coordinates, with three times the states' own scale."""
    seen = Observer(specimen, CUT, "float32", Nothing()).watch(random_texts(20, seed=8))
    states = torch.cat([session.up[1:] for session in seen]).float()
    # Always the same ones, whichever tests came before.
    axes = (
        torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)))
        .Q[:, :size]
        .contiguous()
    )
    own = (states - states.mean(0)) @ axes
    veil = Veil(
        axes, axes.T.contiguous(), states.mean(0), 3 * own[:50], torch.full((50,), 0.02), torch.eye(size)
    )
    return PrivateEndsDefence(ends=PrivateEnds(bytes([key] * 32), veil, {}))


def case_of(specimen: Specimen, size: int, own: bool = False) -> Case:
    defence = defence_of(specimen, size)
    device = specimen.changed(lambda _, weight: weight, CUT)
    private = Observer(specimen, CUT, "float16", defence, 5, device)
    victims = private.watch(random_texts(3, seed=1))
    public = Observer(specimen, CUT, "float16", Nothing(), 5)
    copy = replace(private, defence=replace(defence, ends=replace(defence.ends, key=bytes(32))), seed=77)
    return Case(
        public,
        victims,
        random_texts(200, seed=2),
        800,
        lambda *_: None,
        device=private,
        own=copy if own else None,
    )


def share(found: Recovered, case: Case) -> float:
    right = [ranked[:, 0] == seen.tokens for ranked, seen in zip(found.guesses, case.victims, strict=True)]
    return float(torch.cat(right).float().mean())


def test_a_fit_finds_what_was_planted() -> None:
    generator = torch.Generator().manual_seed(4)
    public = torch.randn(3000, 8, generator=generator)
    turn, offset = torch.randn(8, 8, generator=generator), torch.randn(8, generator=generator)
    mixing = torch.randn(8, 8, generator=generator)
    private = public @ turn + offset + 0.1 * torch.randn(3000, 8, generator=generator) @ mixing.T
    found = fit(public, private, None, 8.0)
    assert torch.allclose(found.map, turn, atol=0.03)
    assert torch.allclose(found.offset, offset, atol=0.03)
    assert torch.allclose(found.covariance, 0.01 * mixing @ mixing.T, atol=0.02)
    white = torch.linalg.multi_dot([found.whitener().T, found.covariance, found.whitener()])
    assert torch.allclose(white, torch.eye(8), atol=1e-3)
    few = fit(public[:2] + 5, public[:2], found, 1e6)
    assert torch.allclose(few.map, found.map, atol=0.01), "a few pairs do not overturn what was known"


def test_the_simulated_device_sends_what_the_real_one_does(clear: Specimen) -> None:
    case = case_of(clear, 16)
    device = Simulated(Adaptive(800)._fit(case)[0])
    mine = Observer(clear, CUT, "float32", device, 3).watch(random_texts(30, seed=2))
    assert case.device is not None
    real = [device.whiten(seen) for seen in case.device.watch(random_texts(30, seed=2))]
    for statistic in (torch.mean, torch.std):
        ours, theirs = (torch.cat([s.up[1:] for s in sessions]) for sessions in (mine, real))
        assert float(statistic(ours)) == pytest.approx(float(statistic(theirs)), rel=0.25, abs=0.3)


@pytest.mark.parametrize(("leaked", "own"), [(0, True), (700, False), (700, True)])
def test_they_read_through_a_mask_that_blinds_others(clear: Specimen, leaked: int, own: bool) -> None:
    case = case_of(clear, 24, own)
    assert share(Vocabulary(None, SOME).run(case), case) < 0.5
    found = Adaptive(leaked).run(case)
    assert share(found, case) > 0.9
    assert found.extra["leaked"] == leaked
    assert found.extra["own_copy"] is own


def test_a_mask_that_replaces_everything_leaves_nothing_to_read(clear: Specimen) -> None:
    case = case_of(clear, 32)
    first = 1 / 14  # the first token of a text has no mask
    assert share(Adaptive(700).run(case), case) < 2 * first + 0.1


def test_leaked_pairs_alone_are_enough_for_an_inverter(clear: Specimen) -> None:
    case = case_of(clear, 16)
    assert share(Leaked(Linear(), 800).run(case), case) > 0.7


def test_the_answer_is_read_off_what_went_up(clear: Specimen) -> None:
    case = case_of(clear, 16)
    assert case.device is not None
    sessions = case.device.watch(random_texts(2, seed=1), answer=5)
    answers = replace(case, victims=sessions)
    found = Adaptive(700, target="answer").run(answers)
    assert [len(guess) for guess in found.guesses] == [5, 5]
    right = [guess[:-1, 0] == seen.answer[:-1] for guess, seen in zip(found.guesses, sessions, strict=True)]
    assert float(torch.cat(right).float().mean()) > 0.8
