"""Inverters that learn: from a tiny model's states with few words, and from nothing worth learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aparte.privacy.attack import Case
from aparte.privacy.baselines import Frequency, LanguageModelOnly, Uniform
from aparte.privacy.defences import Noise
from aparte.privacy.gradient import Front, Gradient
from aparte.privacy.linear import Linear
from aparte.privacy.metrics import RANKS
from aparte.privacy.mlp import CLASSES, Mlp
from aparte.privacy.observe import Seen
from aparte.privacy.sequence import SequenceInverter
from aparte.privacy.specimen import Specimen
from privacy.conftest import MakeCase, random_texts
from tiny import tiny_model

pytestmark = pytest.mark.slow

WORDS = 40  # different tokens in victims' and attacker's texts
LEARNERS: list[Any] = [Mlp(20, passes=25), SequenceInverter(20, passes=25), Linear()]


def small(case: Case) -> Case:
    """The same device, with texts of few different tokens."""
    texts = random_texts(4, seed=11, vocabulary=WORDS)
    corpus = random_texts(200, seed=12, vocabulary=WORDS)
    return Case(case.observer, case.observer.watch(texts), corpus, 1500, case.progress)


def share(found: Any, case: Case, start: int = 1) -> float:
    """Of the tokens from ``start`` on; the first one's state is like no other."""
    hits = [
        (guess[:, 0] == seen.tokens)[start:] for guess, seen in zip(found.guesses, case.victims, strict=False)
    ]
    return float(torch.cat(hits).float().mean())


@pytest.mark.parametrize("attack", LEARNERS, ids=lambda attack: attack.name)
def test_learns_to_read(attack: Any, clear: Specimen, make_case: MakeCase) -> None:
    case = small(make_case(of=clear))
    found = attack.run(case)
    assert share(found, case) > 0.9
    assert 1400 < found.attacker_tokens <= 1500
    assert all(
        guess.shape == (len(seen.tokens), RANKS)
        for guess, seen in zip(found.guesses, case.victims, strict=True)
    )


@pytest.mark.parametrize("attack", LEARNERS, ids=lambda attack: attack.name)
def test_learns_nothing_where_there_is_nothing(attack: Any, clear: Specimen, make_case: MakeCase) -> None:
    case = small(make_case(Noise(epsilon=0.1), of=clear, wire="float32"))
    assert share(attack.run(case), case) < 0.2


def test_the_same_seed_learns_the_same(make_case: MakeCase) -> None:
    guesses = [Mlp(60, passes=2).run(small(make_case())).guesses for _ in range(2)]
    assert all(torch.equal(left, right) for left, right in zip(*guesses, strict=True))


def test_many_classes_go_through_the_embedding_space(
    clear: Specimen, make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aparte.privacy.mlp.CLASSES", WORDS // 2)
    case = small(make_case(of=clear))
    found = Mlp(20, passes=25).run(case)
    assert found.extra == {"output": "embedding"}
    assert share(found, case) > 0.9
    assert CLASSES > WORDS


def test_the_differentiable_front_is_the_front(specimen: Specimen) -> None:
    tokens = torch.arange(5, 15)[None]
    model = tiny_model("llama")
    expected = model(tokens, output_hidden_states=True).hidden_states[3]
    embedded = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(Front(specimen, 3)(embedded), expected, rtol=1e-4, atol=1e-4)


def test_descent_finds_tokens(clear: Specimen, make_case: MakeCase) -> None:
    case = make_case(of=clear)
    found = Gradient(60, steps=200, texts=2).run(case)
    assert len(found.guesses) == 2
    assert share(found, case, start=0) > 0.7


class TestBaselines:
    def test_uniform_hardly_hits(self, make_case: MakeCase) -> None:
        case = make_case(victims=20)
        assert share(Uniform().run(case), case) < 0.1

    def test_frequency_names_the_most_frequent(self, make_case: MakeCase) -> None:
        case = make_case()
        often = [[7, 7, 7, 8, 8, 9]] * 3
        found = Frequency().run(Case(case.observer, case.victims, often, 100, case.progress))
        assert all(guess[:, :3].tolist() == [[7, 8, 9]] * len(guess) for guess in found.guesses)

    def test_the_language_model_names_what_it_would_write(self, make_case: MakeCase) -> None:
        """On a text that the model wrote itself it is right, from the text alone."""
        case = make_case(answer=8, wire="float32")
        found = LanguageModelOnly().run(case)
        for guess, seen in zip(found.guesses, case.victims, strict=True):
            written = len(seen.answer) - 1
            assert guess[-written:, 0].tolist() == seen.answer[:-1].tolist()

    def test_no_baseline_looks_at_states(self, make_case: MakeCase) -> None:
        case = make_case()
        blind = [Seen(s.tokens, torch.zeros_like(s.up), s.down, s.answer, s.cut) for s in case.victims]
        for baseline in (Uniform(), Frequency(), LanguageModelOnly()):
            plain = baseline.run(case)
            again = baseline.run(Case(case.observer, blind, case.corpus, case.tokens, case.progress))
            assert all(torch.equal(a, b) for a, b in zip(plain.guesses, again.guesses, strict=True))
