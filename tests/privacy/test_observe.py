"""What is observed is what the unsplit model computes at the cut, and the defence is on the way."""

from __future__ import annotations

import pytest
import torch

from aparte.config import Cut
from aparte.privacy.defences import Noise, Nothing, Quantised, RandomCut
from aparte.privacy.observe import Observer
from aparte.privacy.specimen import Specimen, packs, side_by_side
from aparte.step import ROOT
from privacy.conftest import CUT, random_texts
from tiny import FAMILIES, tiny_model

TEXTS = random_texts(6, seed=9)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_unsplit_model(family: str, specimens: dict[str, Specimen]) -> None:
    """Although several texts share a pass, and although the cloud's part runs apart."""
    seen = Observer(specimens[family], CUT, "float32", Nothing()).watch(TEXTS, returned=True)
    model = tiny_model(family)
    for text, mine in zip(TEXTS, seen, strict=True):
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        assert mine.tokens.tolist() == text
        torch.testing.assert_close(mine.up, states[2][0], rtol=1e-4, atol=1e-4)
        assert mine.down is not None
        torch.testing.assert_close(mine.down, states[4][0], rtol=1e-4, atol=1e-4)


def test_answers_are_those_of_the_unsplit_model(specimen: Specimen) -> None:
    seen = Observer(specimen, CUT, "float32", Nothing()).watch(TEXTS[:3], answer=6)
    model = tiny_model("llama")
    for text, mine in zip(TEXTS, seen, strict=False):
        whole = list(text)
        for _ in range(6):
            whole.append(int(model(torch.tensor([whole])).logits[0, -1].argmax()))
        assert mine.answer.tolist() == whole[len(text) :]
        assert mine.tokens.tolist() == whole[:-1]
        assert len(mine.up) == len(whole) - 1


def test_the_wire_rounds_what_is_seen(specimen: Specimen) -> None:
    exact, rounded = (
        Observer(specimen, CUT, wire, Nothing()).watch(TEXTS[:1])[0].up for wire in ("float32", "float16")
    )
    assert rounded.dtype == torch.float16
    assert torch.equal(exact.half(), rounded)


def test_the_defence_is_on_the_way(specimen: Specimen) -> None:
    plain = Observer(specimen, CUT, "float32", Nothing()).watch(TEXTS[:2])
    coarse = Observer(specimen, CUT, "float32", Quantised(bits=3)).watch(TEXTS[:2])
    for left, right in zip(plain, coarse, strict=True):
        assert torch.equal(Quantised(bits=3).protect(left.up, 0, torch.Generator()), right.up)
        assert not torch.equal(left.up, right.up)


def test_noise_follows_the_seed_and_differs_between_texts(specimen: Specimen) -> None:
    noise = Noise(1000)
    noise.calibrate(torch.ones(4, 32), torch.ones(4, 32))
    same = [TEXTS[0], TEXTS[0]]
    first, again, other = (Observer(specimen, CUT, "float32", noise, seed).watch(same) for seed in (1, 1, 2))
    assert torch.equal(first[0].up, again[0].up)
    assert not torch.equal(first[0].up, first[1].up)
    assert not torch.equal(first[0].up, other[0].up)


def test_a_cut_is_drawn_for_every_session(specimen: Specimen) -> None:
    observer = Observer(specimen, CUT, "float32", RandomCut(low=1, high=3), seed=4)
    seen = observer.watch(random_texts(12, seed=1))
    assert {mine.cut for mine in seen} == {Cut(1, 2), Cut(2, 2), Cut(3, 2)}
    model = tiny_model("llama")
    for mine in seen[:4]:
        states = model(mine.tokens[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(mine.up, states[mine.cut.front][0], rtol=1e-4, atol=1e-4)


def test_packs_hold_consecutive_texts_and_all_of_them() -> None:
    ranges = packs([300, 200, 100, 700, 5])
    assert [list(pack) for pack in ranges] == [[0, 1], [2], [3], [4]]
    assert packs([]) == []


def test_chains_side_by_side_hang_below_the_root() -> None:
    assert side_by_side([3, 1, 2]).parents == (ROOT, 0, 1, ROOT, ROOT, 4)


def test_a_run_has_to_end_at_bounds(specimen: Specimen) -> None:
    coarse = Specimen(specimen.blueprint, [2])
    with pytest.raises(ValueError, match="bounds"):
        coarse.run(range(3))
