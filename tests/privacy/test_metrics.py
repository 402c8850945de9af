"""Scores of guesses whose worth is known."""

from __future__ import annotations

import pytest
import torch

from aparte.errors import UserError
from aparte.privacy.metrics import RANKS, bleu, personal_data, rouge_l, score
from aparte.privacy.texts import Entity

WORDS = ["zero", "one", "two", "three", "four", "five", "Anna", "Adler", "lives", "here"]


def decode(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def ranked(firsts: list[int], second: int = 0) -> torch.Tensor:
    rows = torch.full((len(firsts), RANKS), second)
    rows[:, 0] = torch.tensor(firsts)
    return rows


def test_a_perfect_guess() -> None:
    truth = torch.tensor([1, 2, 3, 4])
    scores = score([ranked([1, 2, 3, 4])], [truth], decode)
    assert (scores.top1, scores.top5, scores.exact, scores.rouge_l) == (1, 1, 1, 1)
    assert scores.bleu == pytest.approx(1)
    assert scores.pii_recall is None


def test_tokens_count_and_not_texts() -> None:
    """Three of four tokens in one text, none of one in the other: three of five."""
    truths = [torch.tensor([1, 2, 3, 4]), torch.tensor([5])]
    scores = score([ranked([1, 2, 3, 5], second=4), ranked([1])], truths, decode)
    assert scores.top1 == pytest.approx(3 / 5)
    assert scores.top5 == pytest.approx(4 / 5)
    assert scores.exact == 0
    assert scores.tokens == 5


def test_half_of_the_texts_whole() -> None:
    truths = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert score([ranked([1, 2]), ranked([3, 5])], truths, decode).exact == 0.5


def test_rouge_and_bleu_of_known_pairs() -> None:
    assert rouge_l([("a b x d", "a b c d")]) == pytest.approx(0.75)
    assert rouge_l([("x y", "a b")]) == 0
    same = "the cat sat on the mat today"
    assert bleu([(same, same)]) == pytest.approx(1)
    assert bleu([("entirely other words stand here now again", same)]) < 0.1


def test_personal_data_by_type() -> None:
    pairs = [("my name is anna  adler of Graz", "my name is Anna Adler of Bergen")]
    entities = [
        [Entity("PERSON", "Anna Adler"), Entity("CITY", "Bergen"), Entity("PHONE", "not in the text")]
    ]
    assert personal_data(pairs, entities) == {"PERSON": [True], "CITY": [False]}


def test_personal_data_has_to_stand_there_as_whole_words() -> None:
    assert personal_data([("aged 412", "aged 41")], [[Entity("AGE", "41")]]) == {"AGE": [False]}
    assert personal_data([("a+b (c)", "a+b (c)")], [[Entity("CODE", "(c)")]]) == {"CODE": [True]}


def test_recall_over_all_types() -> None:
    truths = [torch.tensor([6, 7, 8, 9]), torch.tensor([6, 8])]
    entities = [[Entity("PERSON", "Anna Adler")], [Entity("FIRST", "Anna")]]
    scores = score([ranked([6, 7, 1, 1]), ranked([1, 8])], truths, decode, entities)
    assert scores.pii == {"PERSON": 1.0, "FIRST": 0.0}
    assert scores.pii_recall == 0.5
    assert scores.to_json()["pii_recall"] == 0.5


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(UserError, match="no text"):
        score([], [], decode)
