"""How much of a text an attack recovered: tokens, sentences, personal data.

Sources: top-1 and top-5 as in paper A; ROUGE-L and BLEU by ``rouge-score`` and ``sacrebleu``, as the
inversion literature reports them (arXiv 2503.09291, 2505.18332). Assumptions: an attack says something
for every position, so that texts have equal length in tokens. Cost: none to speak of.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aparte.errors import UserError
from aparte.privacy.texts import Entity

#: Candidates per position that an attack hands in.
RANKS = 5

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1. ``pii`` is by entity type, ``None`` where the texts hold no personal data."""

    top1: float
    top5: float
    exact: float
    rouge_l: float
    bleu: float
    tokens: int
    pii_recall: float | None = None
    pii: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields as in ``results.json``, rounded to four digits."""
        return {
            "top1": round(self.top1, 4),
            "top5": round(self.top5, 4),
            "exact": round(self.exact, 4),
            "rouge_l": round(self.rouge_l, 4),
            "bleu": round(self.bleu, 4),
            "pii_recall": None if self.pii_recall is None else round(self.pii_recall, 4),
            "pii": {kind: round(share, 4) for kind, share in sorted(self.pii.items())},
            "tokens": self.tokens,
        }


def score(
    guesses: Sequence[torch.Tensor],
    truths: Sequence[torch.Tensor],
    decode: Decode,
    entities: Sequence[Sequence[Entity]] = (),
) -> Scores:
    """Compare ``guesses`` ``[T, RANKS]`` per text, best first, with ``truths`` ``[T]``."""
    firsts = fives = count = whole = 0
    pairs: list[tuple[str, str]] = []
    for guess, truth in zip(guesses, truths, strict=True):
        hits = guess == truth[:, None]
        firsts += int(hits[:, 0].sum())
        fives += int(hits.any(1).sum())
        whole += bool(hits[:, 0].all())
        count += len(truth)
        pairs.append((decode(guess[:, 0].tolist()), decode(truth.tolist())))
    if not count:
        raise UserError("There is no text to attack. Give a --text with some lines of words in it.")
    found = personal_data(pairs, entities)
    every = [hit for hits_of in found.values() for hit in hits_of]
    return Scores(
        top1=firsts / count,
        top5=fives / count,
        exact=whole / len(pairs),
        rouge_l=rouge_l(pairs),
        bleu=bleu(pairs),
        tokens=count,
        pii_recall=sum(every) / len(every) if every else None,
        pii={kind: sum(hits_of) / len(hits_of) for kind, hits_of in found.items()},
    )


def personal_data(
    pairs: Sequence[tuple[str, str]], entities: Sequence[Sequence[Entity]]
) -> dict[str, list[bool]]:
    """By entity type, whether each value that stands in the true text stands in the recovered one too.

    Case and spacing are ignored; a value has to stand there as whole words.
    """
    found: dict[str, list[bool]] = defaultdict(list)
    for (recovered, truth), mine in zip(pairs, entities, strict=False):
        for entity in mine:
            if _holds(truth, entity.value):
                found[entity.kind].append(_holds(recovered, entity.value))
    return dict(found)


def _holds(text: str, value: str) -> bool:
    plain, wanted = (" ".join(part.casefold().split()) for part in (text, value))
    return bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", plain) is not None


def rouge_l(pairs: Sequence[tuple[str, str]]) -> float:
    """Mean F-measure of ROUGE-L of ``(recovered, true)`` texts."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise _missing("rouge-score") from None
    scorer = RougeScorer(["rougeL"])
    values = [scorer.score(truth, recovered)["rougeL"].fmeasure for recovered, truth in pairs]
    return float(sum(values) / len(values))


def bleu(pairs: Sequence[tuple[str, str]]) -> float:
    """Corpus BLEU of ``(recovered, true)`` texts, between 0 and 1."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError:
        raise _missing("sacrebleu") from None
    recovered, truths = zip(*pairs, strict=True)
    return float(corpus_bleu(list(recovered), [list(truths)]).score) / 100


def _missing(package: str) -> UserError:
    return UserError(
        f"The audit needs {package}, which is not installed. Install it with `pip install 'aparte[audit]'`."
    )
