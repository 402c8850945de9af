"""Training of learned inverters: a network from states to the embedding space, scored against the vocabulary.

A softmax over a whole vocabulary is what makes inverters slow to train on a CPU. A classifier can never name
a token that it was not trained on; so with little text the classes are the tokens in it. With more, the
network's output is a point in the embedding space and its product with a token's embedding that token's
score; the loss is a softmax over the batch's own tokens and random others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from aparte.model.parts import Progress
from aparte.privacy.observe import Seen

#: Random tokens in the loss beside those of the batch.
NEGATIVES = 1024
#: States by which they are scaled; more change nothing.
SCALED = 50_000
#: States are clipped at so many deviations: some dimensions are a hundred times larger than all others.
CLIP = 8.0


class Scaler(nn.Module):
    """States as a network likes them: every dimension with mean 0 and deviation 1, clipped."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        sample = states[:: -(-len(states) // SCALED)].float()
        self.register_buffer("mean", sample.mean(0))
        self.register_buffer("deviation", sample.std(0, unbiased=False).clamp_min(1e-6))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = (states - self.mean) / self.deviation
        return scaled.clamp(-CLIP, CLIP)


class Vocabulary(nn.Module):
    """Points of the embedding space to scores of tokens: normalised products times a learned scale."""

    table: torch.Tensor

    def __init__(self, embeddings: torch.Tensor) -> None:
        super().__init__()
        centred = embeddings - embeddings.mean(0)
        self.register_buffer("table", nn.functional.normalize(centred, dim=1))  # [V, D]
        self.scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, points: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """``[n, D] -> [n, V]``, or scores of ``tokens`` ``[c]`` only: ``[n, c]``."""
        table = self.table if tokens is None else self.table[tokens]
        scores: torch.Tensor = self.scale * (nn.functional.normalize(points, dim=1) @ table.T)
        return scores


@dataclass
class Clock:
    """When training ends: after so many passes over the text, or so many seconds.

    On a CPU those are seconds of this process on all of its cores, so that what else runs on the machine
    makes an attack slower and not weaker.
    """

    passes: int
    seconds: float
    device: torch.device

    def __post_init__(self) -> None:
        self._started = self._now()

    def _now(self) -> float:
        if self.device.type != "cpu":
            return time.perf_counter()
        return time.process_time() / torch.get_num_threads()

    @property
    def share(self) -> float:
        """Share of the seconds that are over."""
        return min(1.0, (self._now() - self._started) / self.seconds)


def classes_loss(points: torch.Tensor, tokens: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Cross-entropy of ``tokens`` ``[n]`` among the batch's tokens and random others."""
    size = len(vocabulary.table)
    others = torch.randint(size, (min(NEGATIVES, size),), device=tokens.device)
    classes = torch.unique(torch.cat([tokens, others]))  # sorted
    return nn.functional.cross_entropy(vocabulary(points, classes), torch.searchsorted(classes, tokens))


def fit(
    network: nn.Module,
    batches: Iterator[torch.Tensor],
    steps: int,
    clock: Clock,
    rate: float,
    progress: Progress,
    label: str,
) -> None:
    """Adam over losses that ``batches`` yields, with a rate that falls to nothing."""
    optimiser = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01)
    network.train()
    for step, loss in enumerate(batches):
        done = max(step / steps, clock.share)
        if done >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, 20 * (step + 1) / steps) * (1 - done)
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimiser.step()
        if step % 10 == 0:
            progress(label, int(1000 * done), 1000)
    progress(label, 1000, 1000)
    network.eval()


def rows(sessions: Sequence[Seen], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[N]`` and states ``[N, D]`` where training happens, in the wire's number format: a million
    states take a gigabyte in 16 bits."""
    tokens = torch.cat([seen.tokens for seen in sessions])
    states = torch.cat([seen.up for seen in sessions])
    return tokens.to(device), states.to(device)
