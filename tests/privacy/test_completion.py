"""The answer is read off the middle's output."""

from __future__ import annotations

import pytest
import torch

from aparte.config import Cut
from aparte.privacy.attack import Recovered
from aparte.privacy.completion import Completion, LogitLens
from aparte.privacy.defences import Quantised
from aparte.privacy.specimen import Specimen
from privacy.conftest import MakeCase
from tiny import FAMILIES


def share(found: Recovered, case: object) -> float:
    victims = case.victims  # type: ignore[attr-defined]
    hits = [guess[:, 0] == seen.answer for guess, seen in zip(found.guesses, victims, strict=True)]
    return float(torch.cat(hits).float().mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_completion_reads_every_token(
    family: str, specimens: dict[str, Specimen], make_case: MakeCase
) -> None:
    case = make_case(of=specimens[family], answer=8)
    assert share(Completion().run(case), case) == 1


@pytest.mark.parametrize("back", [1, 3])
def test_at_every_depth_and_under_a_defence(back: int, make_case: MakeCase) -> None:
    """Whatever was done to the prompt: the device writes what the middle's output says."""
    case = make_case(Quantised(bits=4), cut=Cut(1, back), answer=8)
    assert share(Completion().run(case), case) == 1


def test_the_lens_sees_less_than_the_back(make_case: MakeCase) -> None:
    case = make_case(cut=Cut(1, 4), answer=8)
    assert share(LogitLens().run(case), case) < share(Completion().run(case), case)


def test_it_needs_no_text_of_its_own(make_case: MakeCase) -> None:
    assert Completion().run(make_case(answer=4, tokens=0)).attacker_tokens == 0
