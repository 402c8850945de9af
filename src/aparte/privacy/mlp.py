"""Paper A's inverter: a network of three layers from one state to its token, position by position.

Source: paper A (arXiv 2602.16760), 4096-2048-2048-32000 on about 880 samples; with more data arXiv
2503.09291. Assumptions: pairs of own text and states that the device sends for it; no weights of the device.
Sizes go from the paper's to a million states. Up to :data:`CLASSES` different tokens in the attacker's text
they are the classes, as in the paper (a class without a sample is never named). With more text the output is
a point in the public embedding space (nearest token), which adds that table to the assumptions. Cost: minutes
of training on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from aparte.privacy.attack import Case, Recovered, Target, total
from aparte.privacy.learn import Clock, Scaler, Vocabulary, classes_loss, fit, rows
from aparte.privacy.metrics import RANKS

#: Samples in paper A.
PAPER_SAMPLES = 880
#: Most classes for which a full softmax is trained.
CLASSES = 1500
#: With more states than this the network is twice as wide.
MANY = 200_000
BATCH = 256


class Mlp:
    """Three layers, one state at a time."""

    name = "mlp"
    target: Target = "prompt"
    threat = "pairs"
    source = "Paper A, arXiv 2602.16760; data sizes of arXiv 2503.09291."
    assumes = "Own text with the states that the device sends for it; with much text the public embedding."
    cost = "Seconds to minutes of training."

    def __init__(self, seconds: float = 300.0, passes: int = 30) -> None:
        self._seconds = seconds
        self._passes = passes

    def run(self, case: Case) -> Recovered:
        sessions = case.pairs()
        started = time.perf_counter()
        specimen = case.observer.specimen
        device = specimen.blueprint.precision.device
        tokens, states = rows(sessions, device)
        known = torch.unique(tokens)
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(case.seed)
            # Half of the width as in the paper, but never narrower than helps.
            hidden = max(512, specimen.width // 2) * (2 if len(tokens) > MANY else 1)
            body = nn.Sequential(
                Scaler(states),
                nn.Linear(specimen.width, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
            )
            if len(known) <= CLASSES:
                network = nn.Sequential(body, nn.Linear(hidden, len(known))).to(device)
                names: torch.Tensor | None = known
            else:
                network = nn.Sequential(
                    body, nn.Linear(hidden, specimen.width), Vocabulary(specimen.embeddings())
                ).to(device)
                names = None
            clock = Clock(self._passes, self._seconds, device)
            steps = self._passes * -(-len(tokens) // BATCH)
            losses = self._losses(network, states, tokens, names)
            fit(network, losses, steps, clock, 1e-3, case.progress, "training the MLP")
        guesses = []
        with torch.no_grad():
            for seen in case.victims:
                best = network(seen.up.float().to(device)).topk(min(RANKS, len(known))).indices
                best = best if names is None else names[best]
                guesses.append(nn.functional.pad(best, (0, RANKS - best.shape[1]), value=-1).cpu())
        kind = "classes" if names is not None else "embedding"
        return Recovered(guesses, total(sessions), time.perf_counter() - started, {"output": kind})

    def _losses(
        self,
        network: nn.Sequential,
        states: torch.Tensor,
        tokens: torch.Tensor,
        names: torch.Tensor | None,
    ) -> Iterator[torch.Tensor]:
        while True:
            for chosen in torch.split(torch.randperm(len(tokens), device=tokens.device), BATCH):
                rows_of = states[chosen].float()
                if names is not None:
                    wanted = torch.searchsorted(names, tokens[chosen])
                    yield nn.functional.cross_entropy(network(rows_of), wanted)
                else:
                    vocabulary = network[-1]
                    assert isinstance(vocabulary, Vocabulary)
                    yield classes_loss(network[:-1](rows_of), tokens[chosen], vocabulary)
