"""BLEU and ROUGE: known values, and a clear word where the packages are missing."""

from __future__ import annotations

import importlib.util
import math

import pytest

from aparte.errors import UserError
from aparte.measure import scores
from aparte.measure.scores import check_scores, score

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sacrebleu", "rouge_score")),
    reason="sacrebleu and rouge-score (extra: scores) are not installed",
)
REFERENCE = "the cat sat on the mat and looked at the dog"


@needs_packages
class TestScores:
    def test_the_reference_itself(self) -> None:
        found = score([REFERENCE], [REFERENCE])
        assert found.to_json() == {"bleu1": 100, "bleu4": 100, "rouge1": 100, "rougeL": 100}

    def test_half_of_the_words(self) -> None:
        """Five of ten words right, in pairs: by hand."""
        answer = "the cat sat on the zebra xylophone quartz jumbo kiwi"
        found = score([answer], ["the cat sat on the mat and looked at dog"])
        assert found.bleu1 == pytest.approx(50)
        precisions = 5 / 10, 4 / 9, 3 / 8, 2 / 7
        assert found.bleu4 == pytest.approx(100 * math.prod(precisions) ** 0.25)
        assert found.rouge1 == pytest.approx(50)
        assert found.rougeL == pytest.approx(50)

    def test_order_matters_to_rouge_l_only(self) -> None:
        found = score(["dog the at looked and mat the on sat cat the"], [REFERENCE])
        assert found.rouge1 == pytest.approx(100)
        assert found.rougeL < 40

    def test_short_answers_are_penalised_in_bleu(self) -> None:
        assert score(["the cat sat on"], [REFERENCE]).bleu1 == pytest.approx(100 * math.exp(1 - 11 / 4))

    @pytest.mark.parametrize("answers", [[], ["one"]])
    def test_a_reference_for_each(self, answers: list[str]) -> None:
        with pytest.raises(ValueError, match="reference"):
            score(answers, ["one", "two"])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "find_spec", lambda name: None if name == "rouge_score" else object())
    with pytest.raises(UserError, match=r"rouge-score.*aparte\[scores\]") as failure:
        check_scores()
    assert "sacrebleu" not in str(failure.value)
