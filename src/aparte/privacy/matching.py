"""Running candidates: one text's prefix in the attacker's copy of the front, and candidates below it.

The slot tree that lets the device speculate serves the attacker as well: all candidates for a position are
siblings below the recovered prefix, and go through the front together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aparte.config import Cut
from aparte.privacy.attack import joined
from aparte.privacy.defence import Defence
from aparte.privacy.inverter import Inverter
from aparte.privacy.observe import Observer, Seen
from aparte.privacy.specimen import PACK, Specimen
from aparte.step import ROOT, Step, chain_parents

#: How far beyond the largest distance of a right token in the trial a token is still taken for right.
MARGIN = 1.5
#: Distances up to here are those of one token computed among others: in the trial all may happen to be equal
#: to the bit, and not in the search, where other numbers of candidates run together.
ROUNDING = 1e-5
#: Candidates in the trial, besides the right one.
TRIAL_CANDIDATES = 8
#: Positions of a text in the trial; the noise of a state does not depend much on where it stands.
TRIAL_LENGTH = 24


class Prefix:
    """A recovered prefix in the front's cache. States are what ``defence`` would send for them on average."""

    def __init__(self, specimen: Specimen, cut: Cut, defence: Defence) -> None:
        self._specimen = specimen
        self._defence = defence
        self._length = 0
        self._run = specimen.front(cut)
        self._tip = ROOT
        self._base = 0
        self._number = 0
        self._positions = torch.arange(0)

    def chain(self, tokens: torch.Tensor) -> torch.Tensor:
        """States ``[n, D]`` of ``tokens`` as a continuation of the prefix; nothing is kept yet."""
        positions = torch.arange(self._length, self._length + len(tokens))
        return self._step(tokens, chain_parents(self._tip, self._base, len(tokens)), positions)

    def siblings(self, tokens: torch.Tensor) -> torch.Tensor:
        """States ``[n, D]`` of each of ``tokens`` as the next one of the prefix; nothing is kept yet."""
        positions = torch.full((len(tokens),), self._length)
        return self._step(tokens, (self._tip,) * len(tokens), positions)

    def below(self, tokens: torch.Tensor, successor: torch.Tensor) -> torch.Tensor:
        """States ``[n, D]`` of the token ``successor`` below each of ``tokens``, which are siblings."""
        count = len(tokens)
        parents = (self._tip,) * count + tuple(range(self._base, self._base + count))
        positions = torch.full((count,), self._length)
        both = torch.cat([tokens, successor.expand(count)])
        return self._step(both, parents, torch.cat([positions, positions + 1]))[count:]

    def keep(self, node: int) -> None:
        """Go on from the ``node``-th token of the last call."""
        self._tip = self._base + node
        self._base = self._tip + 1
        self._length = int(self._positions[node]) + 1

    def _step(self, tokens: torch.Tensor, parents: tuple[int, ...], positions: torch.Tensor) -> torch.Tensor:
        self._number += 1
        self._positions = positions
        step = Step(self._number, 0, self._tip, self._base, parents)
        states = self._run.forward(step, self._specimen.embedding(tokens)).float().cpu()
        return self._defence.expected(states, positions)


@dataclass(frozen=True)
class Tolerance:
    """What a trial on own text says about distances between a candidate's state and the one received.

    Distances are relative to the received state's length. ``accept`` is the distance below which a candidate
    is taken for right without a look at others, or None where right and wrong ones overlap.
    ``variance`` is that of the received numbers around the right candidate's, over the squared length.
    """

    accept: float | None
    variance: float


class Matcher:
    """What the attacker prepares once per cut and defence: who is a candidate, and how near is near."""

    def __init__(self, observer: Observer, sessions: list[Seen], seed: int, trials: int = 5) -> None:
        """``observer`` has one cut; ``sessions`` are the attacker's own text, seen through it."""
        self.observer = observer
        self.specimen = observer.specimen
        self.cut = observer.defence.cuts(observer.cut)[0]
        embeddings = self.specimen.embeddings()
        tokens, states, positions = joined(sessions)
        rest = positions > 0
        self._rest = Inverter(states[rest], tokens[rest], embeddings)
        openings = self._openings(seed)
        self._first = Inverter(*joined(openings)[1::-1], embeddings)
        heads = openings[:24]
        scores = self._first.scores(torch.cat([seen.up for seen in heads]))
        #: States of tokens that were tried as the first of a text, where there is no context to matter.
        self._tried: dict[int, torch.Tensor] = {}
        self.first = self._trial(heads, list(torch.split(scores, 1)), 0)
        own = [seen.head(TRIAL_LENGTH) for seen in sessions[-trials:]]
        self.rest = self._trial(own, [self.scores(seen.up) for seen in own], 1)

    def prefix(self) -> Prefix:
        """An empty prefix."""
        return Prefix(self.specimen, self.cut, self.observer.defence)

    def first_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """States ``[n, D]`` of each of ``tokens`` at the start of a text; what was run before is kept."""
        new = torch.tensor([token for token in tokens.tolist() if token not in self._tried], dtype=torch.long)
        if len(new):
            states = self.prefix().siblings(new)
            self._tried.update(zip(new.tolist(), states, strict=True))
        return torch.stack([self._tried[token] for token in tokens.tolist()])

    def tolerance(self, position: int) -> Tolerance:
        return self.rest if position else self.first

    def scores(self, up: torch.Tensor) -> torch.Tensor:
        """Log-likelihoods ``[T, V]`` of every token at every position, up to a constant per row."""
        result = self._rest.scores(up)
        result[0] = self._first.scores(up[:1])[0]
        return result

    def _openings(self, seed: int) -> list[Seen]:
        """Tokens at random, each the first of a text of its own."""
        size = min(self.specimen.vocab_size, max(2 * PACK, 3 * self.specimen.width))
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(self.specimen.vocab_size, generator=generator)[:size].tolist()
        return self.observer.watch([[token] for token in chosen])

    def _trial(self, sessions: list[Seen], scored: list[torch.Tensor], start: int) -> Tolerance:
        right, wrong = [], []
        for seen, scores in zip(sessions, scored, strict=True):
            count = min(TRIAL_CANDIDATES, self.specimen.vocab_size - 1)
            scores.scatter_(1, seen.tokens[:, None], -torch.inf)
            others = scores.topk(count).indices  # [T, C]
            prefix = self.prefix()
            for position, token in enumerate(seen.tokens):
                states = prefix.siblings(torch.cat([token[None], others[position]]))
                prefix.keep(0)
                if position >= start:
                    distances = relative(states, seen.up[position])
                    right.append(float(distances[0]))
                    wrong.append(float(distances[1:].min()))
        if not right:
            return Tolerance(None, 1.0)
        limit = max(MARGIN * max(right), min(ROUNDING, min(wrong) / 2))
        squares = torch.tensor(right).square().mean() / self.specimen.width
        return Tolerance(limit if limit < min(wrong) else None, max(float(squares), 1e-12))


def relative(states: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Distances ``[n]`` of ``states`` ``[n, D]`` from ``received`` ``[D]`` or ``[n, D]``, over its length."""
    received = received.float()
    lengths = received.norm(dim=-1).clamp_min(1e-12)
    distances: torch.Tensor = (states - received).norm(dim=-1) / lengths
    return distances
