"""Vocabulary matching recovers planted tokens exactly, at every depth, over every wire."""

from __future__ import annotations

import pytest
import torch

from aparte.config import Cut
from aparte.privacy import matching, vocabulary
from aparte.privacy.attack import Case
from aparte.privacy.defences import Noise, Nothing, Quantised, RandomCut
from aparte.privacy.matching import Matcher, Prefix, Tolerance
from aparte.privacy.specimen import Specimen
from aparte.privacy.vocabulary import Vocabulary, match
from privacy.conftest import MakeCase, random_texts
from tiny import FAMILIES


def share(case: Case) -> float:
    found = Vocabulary().run(case)
    hits = [guess[:, 0] == seen.tokens for guess, seen in zip(found.guesses, case.victims, strict=True)]
    return float(torch.cat(hits).float().mean())


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("front", [1, 2, 3, 4])
def test_exact_at_every_depth(front: int, wire: str, make_case: MakeCase) -> None:
    assert share(make_case(cut=Cut(front, 1), wire=wire)) == 1


def test_other_last_bits_hide_nothing(make_case: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors other numbers of rows give others, and a trial may meet none of them."""
    monkeypatch.setattr(matching, "MARGIN", 0.0)  # as if all of its distances had been nothing
    case = make_case(wire="float32")
    matcher = Matcher(case.observer, case.pairs(), case.seed)
    for seen in case.victims:
        received = seen.up * (
            1 + 1e-6 * torch.randn(seen.up.shape, generator=torch.Generator().manual_seed(1))
        )
        assert match(matcher, received).ranked[:, 0].tolist() == seen.tokens.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_for_every_family(family: str, specimens: dict[str, Specimen], make_case: MakeCase) -> None:
    """A sliding window among them."""
    assert share(make_case(of=specimens[family])) == 1


def test_exact_under_quantisation(make_case: MakeCase) -> None:
    assert share(make_case(Quantised(bits=8))) == 1


def test_a_defence_that_does_nothing_shows_no_effect(make_case: MakeCase) -> None:
    class Idle(Nothing):
        def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:
            return hidden.clone()

    plain, idle = (Vocabulary().run(make_case(defence)) for defence in (None, Idle()))
    for left, right in zip(plain.guesses, idle.guesses, strict=True):
        assert torch.equal(left, right)


def test_noise_that_drowns_the_states_leaves_nothing(make_case: MakeCase) -> None:
    """And the attack says that it went by probability."""
    case = make_case(Noise(epsilon=1.0))
    assert share(case) < 0.2
    assert Vocabulary().run(case).extra == {"by": "probability"}


def test_little_noise_changes_nothing(make_case: MakeCase) -> None:
    assert share(make_case(Noise(epsilon=1e9))) == 1


def test_it_finds_out_a_cut_that_was_drawn(make_case: MakeCase) -> None:
    case = make_case(RandomCut(low=1, high=3), victims=6)
    assert len({seen.cut for seen in case.victims}) > 1
    assert share(case) == 1


def test_it_reads_the_states_and_not_the_truth(make_case: MakeCase) -> None:
    """With other tokens beside the same states it still finds those that made the states."""
    case = make_case()
    found = Vocabulary().run(case)
    lies = [
        type(seen)(torch.zeros_like(seen.tokens), seen.up, seen.down, seen.answer, seen.cut)
        for seen in case.victims
    ]
    again = Vocabulary().run(Case(case.observer, lies, case.corpus, case.tokens, case.progress))
    for left, right in zip(found.guesses, again.guesses, strict=True):
        assert torch.equal(left, right)


def test_tokens_that_no_own_text_had_are_found(specimen: Specimen, make_case: MakeCase) -> None:
    """The search ends up at the whole vocabulary if it has to."""
    case = make_case()
    narrow = [[token % 20 for token in text] for text in random_texts(100, seed=8)]
    assert share(Case(case.observer, case.victims, narrow, 1000, case.progress)) == 1


class Credulous(Matcher):
    """It takes token 0 for the first one, whatever was received: as if all of their states were alike."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.observer, case.pairs(), case.seed)
        self.first = Tolerance(1e9, self.first.variance)

    def scores(self, up: torch.Tensor) -> torch.Tensor:
        result = super().scores(up)
        result[0] = -torch.arange(float(result.shape[1]))
        return result


def test_a_wrong_first_token_is_found_out(make_case: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    # This little model's inverter puts second tokens far down.
    monkeypatch.setattr(vocabulary, "SECONDS", 1000)
    case = make_case()
    matcher = Credulous(case)
    for seen in case.victims:
        assert match(matcher, seen.up).ranked[:, 0].tolist() == seen.tokens.tolist()


def test_below_a_wrong_token_not_everything_is_tried(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What matches nothing costs one search of the vocabulary, and a bounded one per token after it."""
    monkeypatch.setattr(vocabulary, "SOME", (4, 16))
    monkeypatch.setattr(vocabulary, "WIDTHS", (4, 16, 64))
    case = make_case()
    matcher = Matcher(case.observer, case.pairs(), case.seed)
    tried: list[int] = []
    siblings = Prefix.siblings

    def counted(prefix: Prefix, tokens: torch.Tensor) -> torch.Tensor:
        tried.append(len(tokens))
        return siblings(prefix, tokens)

    monkeypatch.setattr(Prefix, "siblings", counted)
    strange = torch.randn_like(case.victims[0].up.float()) * 10
    assert len(match(matcher, strange).ranked) == len(strange)
    size = matcher.specimen.vocab_size
    assert sum(tried) <= 3 * size + len(strange) * (16 + 1)  # the first token's, perhaps again, the second's
    assert sum(tried) < len(strange) * size
