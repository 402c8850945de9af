"""What guessing yields without looking at any state: the floor that every attack is compared with.

Sources: uniform guessing is paper A's baseline; token frequency and a language model alone are the usual
controls of the inversion literature (arXiv 2503.09291). Cost: none; the language model takes one forward
pass per text.
"""

from __future__ import annotations

import time

import torch

from aparte.privacy.attack import Case, Recovered, Target
from aparte.privacy.metrics import RANKS
from aparte.privacy.specimen import side_by_side


class Uniform:
    """Every token is as likely as any other."""

    name = "uniform"
    target: Target = "prompt"
    threat = "none"
    source = "Paper A's baseline."
    assumes = "Nothing."
    cost = "Nothing."

    def run(self, case: Case) -> Recovered:
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(case.seed)
        size = case.observer.specimen.vocab_size
        guesses = [
            torch.stack([torch.randperm(size, generator=generator)[:RANKS] for _ in seen.tokens])
            for seen in case.victims
        ]
        return Recovered(guesses, 0, time.perf_counter() - started)


class Frequency:
    """The tokens that are most frequent in the attacker's text, at every position."""

    name = "frequency"
    target: Target = "prompt"
    threat = "none"
    source = "Usual control."
    assumes = "Text of the same kind."
    cost = "Counting."

    def run(self, case: Case) -> Recovered:
        started = time.perf_counter()
        texts: list[int] = []
        for text in case.corpus:
            texts += text
            if len(texts) >= case.tokens:
                break
        counts = torch.bincount(torch.tensor(texts), minlength=case.observer.specimen.vocab_size)
        best = counts.topk(RANKS).indices
        guesses = [best.expand(len(seen.tokens), RANKS) for seen in case.victims]
        return Recovered(guesses, len(texts), time.perf_counter() - started)


class LanguageModelOnly:
    """The public model itself, asked for each next token given the *true* ones before it.

    No attacker is given the true prefix; that makes it an upper bound for guessing from language alone.
    """

    name = "lm_only"
    target: Target = "prompt"
    threat = "none"
    source = "Usual control; an upper bound, since it is told the true text before each position."
    assumes = "The public model, and all earlier tokens of the text."
    cost = "One pass of the model over the text."

    def run(self, case: Case) -> Recovered:
        started = time.perf_counter()
        specimen = case.observer.specimen
        first = torch.zeros(specimen.vocab_size)
        for text in case.corpus[:1000]:
            first[text[0]] += 1
        opening = first.topk(RANKS).indices[None]
        guesses = []
        for place, seen in enumerate(case.victims):
            case.progress("language model alone", place, len(case.victims))
            run = specimen.run(range(specimen.layers))
            hidden = run.forward(side_by_side([len(seen.tokens)]), specimen.embedding(seen.tokens))
            following = specimen.head(hidden[:-1]).topk(RANKS).indices.cpu()
            guesses.append(torch.cat([opening, following]))
        return Recovered(guesses, 0, time.perf_counter() - started)
