"""Adaptive attackers of private ends: they know the defence, have the public weights, and prepare for it.

Sources: BiSR (arXiv 2409.00960), whose attacker knows the public weights that a private front was trained
from; matching under the defence's own statistics is ours. Assumptions, by attacker: (i) it trained private
ends of its own, with another secret, on its own text, and learns from them what such ends do to a state;
(ii) it also got ``N`` leaked pairs, states that this very device sent for texts that it knows. From either
it fits a linear map from public states to private ones and the covariance of what the map leaves open, the
mask included. Candidates then run in the public front, go through the map, and are compared in units of
that covariance, with the public model's opinion of the text as the prior: vocabulary matching
(:mod:`aparte.privacy.vocabulary`) as it is best done against this defence. Cost: a linear solve, then that
of vocabulary matching under noise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from aparte.privacy.attack import Attack, Case, Recovered, Target, joined, total
from aparte.privacy.defences import Nothing
from aparte.privacy.linear import Linear
from aparte.privacy.metrics import RANKS
from aparte.privacy.mlp import Mlp
from aparte.privacy.observe import Observer, Seen
from aparte.privacy.vocabulary import SOME, TOKENS, Vocabulary

#: Numbers of leaked pairs.
LEAKS = (100, 1_000, 10_000, 100_000)
#: Pairs from its own copy, which cost it nothing.
OWN = 10_000
#: Share of the average variance added to a covariance.
SHRINK = 1e-3


@dataclass(frozen=True)
class Fit:
    """Private states are about ``states @ map + offset`` of public ones, give or take ``covariance``."""

    map: torch.Tensor
    offset: torch.Tensor
    covariance: torch.Tensor

    def whitener(self) -> torch.Tensor:
        """``[D, D]``: states times it have a unit covariance around what is expected."""
        lower = torch.linalg.cholesky(self.covariance.double())
        inverse: torch.Tensor = torch.linalg.inv(lower).T.float()
        return inverse


def fit(public: torch.Tensor, private: torch.Tensor, before: Fit | None, weight: float) -> Fit:
    """From rows of pairs ``[N, D]``; with few of them the fit stays near ``before``, as if that were
    ``weight`` more rows."""
    count, width = public.shape
    start = before or Fit(torch.eye(width), torch.zeros(width), torch.zeros(width, width))
    mean = public.mean(0)
    inputs = public - mean
    rest = private - (public @ start.map + start.offset)
    gram = inputs.T @ inputs
    usual = gram.diagonal().mean() / count  # of one more row
    gram.diagonal().add_((0.1 * weight + 1e-4 * count) * usual)
    offset = rest.mean(0)
    change = torch.linalg.solve(gram, inputs.T @ (rest - offset))
    left = rest - offset - inputs @ change
    # Fitted numbers leave less open than there is.
    scale = count / max(1.0, count - min(width, count / 2))
    found = scale * left.T @ left / count
    prior = start.covariance if before is not None else torch.diag(found.diagonal())
    covariance = (count * found + weight * prior) / (count + weight)
    covariance.diagonal().add_(SHRINK * covariance.diagonal().mean() + 1e-12)
    return Fit(start.map + change, start.offset + offset - mean @ change, covariance)


class Simulated(Nothing):
    """The device as the attacker has come to know it, in whitened numbers: a defence on the public front."""

    def __init__(self, found: Fit) -> None:
        self._whitener = found.whitener()
        self._map = found.map @ self._whitener
        self._offset = found.offset @ self._whitener

    def whiten(self, seen: Seen) -> Seen:
        """A session as received, in these numbers."""
        return replace(seen, up=seen.up.float() @ self._whitener)

    def expected(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        mapped: torch.Tensor = hidden.float().cpu() @ self._map + self._offset
        return mapped

    def protect(self, hidden: torch.Tensor, position: int, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG002
        sent = self.expected(hidden, torch.arange(0))
        return sent + torch.randn(sent.shape, generator=generator)


class Adaptive:
    """Vocabulary matching through what an own copy, leaked pairs, or both tell of the private ends."""

    name = "adaptive"
    threat = "public"
    source = "After BiSR, arXiv 2409.00960; matching under the defence's covariance: ours."
    assumes = "Public weights, the defence, own private ends or leaked pairs; not the secret."
    cost = "A linear solve; then a few passes of the front per token."

    def __init__(self, leaked: int, doubtful: int | None = None, target: Target = "prompt") -> None:
        """``leaked`` pairs of the device's; the first ``doubtful`` texts are attacked, if set."""
        self.leaked = leaked
        self._doubtful = doubtful
        self.target: Target = target

    def run(self, case: Case) -> Recovered:
        found, tokens = self._fit(case)
        started = time.perf_counter()
        device = Simulated(found)
        public = case.observer
        victims = case.victims[: self._doubtful]
        inner = Case(
            Observer(public.specimen, public.cut, "float32", device, public.seed),
            [device.whiten(seen) for seen in victims],
            case.corpus,
            TOKENS,
            case.progress,
            case.seed,
        )
        result = Vocabulary(self._doubtful, SOME).run(inner)
        guesses = result.guesses
        if self.target == "answer":
            guesses = [_answer(ranked, seen) for ranked, seen in zip(guesses, victims, strict=False)]
        extra = {**result.extra, "leaked": self.leaked, "own_copy": case.own is not None}
        return Recovered(guesses, tokens, time.perf_counter() - started, extra)

    def _fit(self, case: Case) -> tuple[Fit, int]:
        found, tokens = None, 0
        for observer, count in ((case.own, OWN), (case.device, self.leaked)):
            if observer is None or not count:
                continue
            sessions = pairs_of(case, observer, count)
            tokens += total(sessions)
            texts = [seen.tokens.tolist() for seen in sessions]
            public = Observer(case.observer.specimen, case.observer.cut, "float32", Nothing())
            _, private, positions = joined(sessions)
            _, plain, _ = joined(public.watch(texts))
            rest = positions > 0  # the first token's state is unlike all others
            found = fit(plain[rest], private[rest], found, float(plain.shape[1]))
        if found is None:
            raise ValueError("an adaptive attacker needs private ends of its own, or leaked pairs")
        return found, tokens


class Leaked:
    """A learned inverter on leaked pairs alone: it needs the public embedding, and no layer."""

    target: Target = "prompt"
    threat = "pairs"

    def __init__(self, attack: Linear | Mlp, leaked: int) -> None:
        self._attack: Attack = attack
        self.leaked = leaked
        self.name = f"leaked_{attack.name}"
        self.source, self.cost = attack.source, attack.cost
        self.assumes = "Pairs that leaked from this device, and the public embedding."

    def run(self, case: Case) -> Recovered:
        if case.device is None:
            raise ValueError("there is no device that pairs could leak from")
        inner = Case(case.device, case.victims, case.corpus, self.leaked, case.progress, case.seed)
        found = self._attack.run(inner)
        return replace(found, extra={**found.extra, "leaked": self.leaked})


def pairs_of(case: Case, observer: Observer, count: int) -> list[Seen]:
    """``count`` tokens of the attacker's text through ``observer``, or as many as there are."""
    return Case(observer, (), case.corpus, count, case.progress, case.seed).pairs()


def _answer(ranked: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Of the tokens recovered from what went up, those of the answer; the last one never went
    up, and token 0 is as good a guess as any."""
    sent = len(seen.answer) - 1
    blind = ranked.new_zeros(1, RANKS)
    return torch.cat([ranked[len(ranked) - sent :], blind])
