"""Scores of answers against references: BLEU with sacrebleu, ROUGE with rouge-score, as the papers report.

BLEU is of the whole corpus: BLEU-4 is sacrebleu's standard, BLEU-1 the same with single words only. ROUGE is
the mean F-measure over the answers, with stemming. All from 0 to 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from aparte.errors import UserError

#: Import names and what to install.
_NEEDED = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score"}


@dataclass(frozen=True)
class Scores:
    """Of some answers; from 0 to 100."""

    bleu1: float
    bleu4: float
    rouge1: float
    rougeL: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in asdict(self).items()}


def check_scores() -> None:
    """Raise :class:`UserError` unless answers can be scored: better now than after an hour."""
    missing = [package for name, package in _NEEDED.items() if find_spec(name) is None]
    if missing:
        raise UserError(
            f"Scores need {' and '.join(missing)}, which is not installed. Install it with "
            "`pip install 'aparte[scores]'`, or use --no-scores."
        )


def score(answers: Sequence[str], references: Sequence[str]) -> Scores:
    """One reference per answer. Raises :class:`UserError` if the packages are missing."""
    if not answers or len(answers) != len(references):
        raise ValueError("There has to be a reference for each answer, and at least one.")
    check_scores()
    # It has no types, and it may be missing where types are checked.
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from sacrebleu.metrics.bleu import BLEU

    bleu1, bleu4 = (
        BLEU(max_ngram_order=order).corpus_score(list(answers), [list(references)]).score for order in (1, 4)
    )
    scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    found = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    rouge1, rouge_l = (
        100 * sum(float(one[name].fmeasure) for one in found) / len(found) for name in ("rouge1", "rougeL")
    )
    return Scores(float(bleu1), float(bleu4), rouge1, rouge_l)
