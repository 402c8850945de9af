"""The closed-form inverter as an attack of its own: no training loop, a few thousand tokens of text.

Source, assumptions and cost are those of :mod:`aparte.privacy.inverter`. It needs the public embedding
and pairs, but no layer of the device, so it also stands for an attacker whose target has a secret front
and an embedding that is public.
"""

from __future__ import annotations

import time

import torch

from aparte.privacy.attack import Case, Recovered, Target, joined, total
from aparte.privacy.inverter import Inverter
from aparte.privacy.metrics import RANKS


class Linear:
    """Position by position, by the most probable token under a linear Gaussian model of the states."""

    name = "linear"
    target: Target = "prompt"
    threat = "pairs"
    source = "Gaussian discriminant with means linear in the public embedding; ours."
    assumes = "The public embedding, and own text with the states that the device sends for it."
    cost = "One linear solve."

    def run(self, case: Case) -> Recovered:
        sessions = case.pairs()
        started = time.perf_counter()
        tokens, states, positions = joined(sessions)
        rest = positions > 0
        inverter = Inverter(states[rest], tokens[rest], case.observer.specimen.embeddings())
        opening = torch.bincount(tokens[~rest], minlength=case.observer.specimen.vocab_size)
        guesses = []
        for seen in case.victims:
            ranked = inverter.scores(seen.up).topk(RANKS).indices
            # The first token's state is unlike all others, and there are few of them to learn from.
            ranked[0] = opening.topk(RANKS).indices
            guesses.append(ranked)
        return Recovered(guesses, total(sessions), time.perf_counter() - started)
