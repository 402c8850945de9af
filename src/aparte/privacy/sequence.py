"""A sequence-aware inverter: a small transformer that reads the states of a whole text at once.

Sources: the trained inverters of arXiv 2503.09291 and 2507.16372, which read sequences. Assumptions: as for
the MLP with much text: own pairs and the public embedding; none of the device's layers. Cost: minutes of
training on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from aparte.privacy.attack import Case, Recovered, Target, total
from aparte.privacy.learn import Clock, Scaler, Vocabulary, classes_loss, fit, rows
from aparte.privacy.metrics import RANKS
from aparte.privacy.observe import Seen

BATCH = 8
#: Longest text that it reads in one piece; longer ones are cut into pieces.
LENGTH = 64
WIDTH = 256


class Reader(nn.Module):
    """Two encoder layers, with attention to both sides, from states to points in the embedding space."""

    def __init__(self, states: torch.Tensor, width: int, size: int) -> None:
        super().__init__()
        self.scaler = Scaler(states)
        self.enter = nn.Linear(width, size)
        self.places = nn.Parameter(torch.randn(LENGTH, size) * 0.02)
        layer = nn.TransformerEncoderLayer(size, 4, 4 * size, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(size, width)
        #: Straight from state to point, so that context only has to add what it knows.
        self.bypass = nn.Linear(width, width)

    def forward(self, states: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """``[B, T, D] -> [B, T, D]``; ``padding`` ``[B, T]`` is True where there is no token."""
        scaled = self.scaler(states)
        hidden = self.enter(scaled) + self.places[: states.shape[1]]
        points: torch.Tensor = self.leave(self.layers(hidden, src_key_padding_mask=padding))
        straight: torch.Tensor = self.bypass(scaled)
        return points + straight


class SequenceInverter:
    """All states of a text together."""

    name = "sequence"
    target: Target = "prompt"
    threat = "pairs"
    source = "arXiv 2503.09291, 2507.16372."
    assumes = "Own text with the states that the device sends for it; the public embedding."
    cost = "Minutes of training."

    def __init__(self, seconds: float = 300.0, passes: int = 30) -> None:
        self._seconds = seconds
        self._passes = passes

    def run(self, case: Case) -> Recovered:
        sessions = case.pairs()
        started = time.perf_counter()
        specimen = case.observer.specimen
        device = specimen.blueprint.precision.device
        pieces = [piece for seen in sessions for piece in _pieces(seen)]
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(case.seed)
            reader = Reader(rows(sessions, device)[1], specimen.width, min(WIDTH, 4 * specimen.width))
            vocabulary = Vocabulary(specimen.embeddings())
            network = nn.ModuleList([reader, vocabulary]).to(device)
            steps = self._passes * -(-len(pieces) // BATCH)
            losses = _losses(reader, vocabulary, pieces, device)
            clock = Clock(self._passes, self._seconds, device)
            fit(network, losses, steps, clock, 1e-3, case.progress, "training the sequence inverter")
        guesses = []
        with torch.no_grad():
            for seen in case.victims:
                parts = []
                for piece in _pieces(seen):
                    states, padding, _ = _padded([piece], device)
                    parts.append(vocabulary(reader(states, padding)[0]).topk(RANKS).indices.cpu())
                guesses.append(torch.cat(parts))
        return Recovered(guesses, total(sessions), time.perf_counter() - started)


Piece = tuple[torch.Tensor, torch.Tensor]


def _pieces(seen: Seen) -> list[Piece]:
    """States and tokens of a session, ``LENGTH`` at a time."""
    parts = torch.split(seen.up.float(), LENGTH), torch.split(seen.tokens, LENGTH)
    return list(zip(*parts, strict=True))


def _padded(pieces: Sequence[Piece], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States ``[B, T, D]``, padding ``[B, T]`` and tokens ``[B, T]``."""
    states = nn.utils.rnn.pad_sequence([piece[0] for piece in pieces], batch_first=True)
    tokens = nn.utils.rnn.pad_sequence([piece[1] for piece in pieces], batch_first=True)
    lengths = torch.tensor([len(piece[1]) for piece in pieces])
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    return states.to(device), padding.to(device), tokens.to(device)


def _losses(
    reader: Reader, vocabulary: Vocabulary, pieces: list[Piece], device: torch.device
) -> Iterator[torch.Tensor]:
    while True:
        for chosen in torch.split(torch.randperm(len(pieces)), BATCH):
            states, padding, tokens = _padded([pieces[index] for index in chosen.tolist()], device)
            points = reader(states, padding)
            yield classes_loss(points[~padding], tokens[~padding], vocabulary)
