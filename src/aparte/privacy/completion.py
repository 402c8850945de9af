"""Output side: read the answer off what the cloud itself computes.

Source: PIDI's "model completion" (arXiv 2606.14210); the logit lens for a back that is not public
(nostalgebraist 2020; tuned lens, arXiv 2303.08112). Assumptions: the public back, norm and head; the logit
lens needs norm and head only. No training, no text. Cost: the back's layers, once per token.

The cloud holds the middle's output for every position. The last layers and the head turn it into the next
token's logits, exactly as the device does. A device that samples does not write the best token each time;
then this gives the distribution, and the state that the device sends next gives the token itself.
"""

from __future__ import annotations

import time

import torch

from aparte.privacy.attack import Case, Recovered, Target
from aparte.privacy.metrics import RANKS
from aparte.privacy.observe import Seen
from aparte.privacy.specimen import Specimen, side_by_side


class Completion:
    """Finish the forward pass with the public back and head."""

    name = "completion"
    target: Target = "answer"
    threat = "public"
    source = "PIDI, arXiv 2606.14210."
    assumes = "The public weights of back, norm and head."
    cost = "The back's forward pass; no training, no text."

    def run(self, case: Case) -> Recovered:
        started = time.perf_counter()
        guesses = [self._next_tokens(case.observer.specimen, seen) for seen in case.victims]
        return Recovered(guesses, 0, time.perf_counter() - started)

    def _next_tokens(self, specimen: Specimen, seen: Seen) -> torch.Tensor:
        hidden = self._last(specimen, seen)[len(seen.tokens) - len(seen.answer) :]
        return specimen.head(hidden).topk(RANKS).indices.cpu()

    def _last(self, specimen: Specimen, seen: Seen) -> torch.Tensor:
        run = specimen.back(seen.cut)
        dtype = specimen.blueprint.precision.dtype
        return run.forward(side_by_side([len(seen.tokens)]), _returned(seen).to(dtype))


class LogitLens(Completion):
    """Norm and head straight on the middle's output, as if the back were secret."""

    name = "logit_lens"
    source = "nostalgebraist 2020; arXiv 2303.08112."
    assumes = "The public norm and head; nothing of the back."
    cost = "One product with the head."

    def _last(self, specimen: Specimen, seen: Seen) -> torch.Tensor:
        precision = specimen.blueprint.precision
        return _returned(seen).to(precision.device, precision.dtype)


def _returned(seen: Seen) -> torch.Tensor:
    if seen.down is None:
        raise ValueError("these sessions were watched without what the cloud returns")
    return seen.down
