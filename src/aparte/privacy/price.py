"""What a defence costs: quality of the text, bytes, speed; against the same device without it.

Perplexity of, and agreement on, held-out text: at every position the device's logits with the defence
against those without. Assumptions: teacher forcing, so an error does not carry on through tokens, only
through the caches. Cost: two passes of the model over the text.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aparte.config import Cut
from aparte.model.parts import Progress
from aparte.privacy.defence import Defence
from aparte.privacy.defences import Nothing
from aparte.privacy.observe import Observer, Seen
from aparte.privacy.specimen import Specimen, side_by_side
from aparte.step import ROOT, Step
from aparte.wire.tensors import TensorCodec

#: Repeats of what is timed; the median counts.
REPEATS = 15


@dataclass(frozen=True)
class Reading:
    """What the device makes of a text: the negative log-likelihood per token, and its choices ``[N]``."""

    nll: float
    choices: torch.Tensor


def read(observer: Observer, texts: Sequence[Sequence[int]], progress: Progress) -> Reading:
    """Read ``texts`` with teacher forcing; every text needs two tokens at least."""
    sessions = observer.watch(texts, returned=True, label="text for the price", progress=progress)
    losses, choices = [], []
    for seen in sessions:
        logits = _logits(observer.device or observer.specimen, seen)[:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, seen.tokens[1:], reduction="none"))
        choices.append(logits.argmax(1))
    return Reading(float(torch.cat(losses).mean()), torch.cat(choices))


def price(
    specimen: Specimen,
    cut: Cut,
    wire: str,
    defence: Defence,
    texts: Sequence[Sequence[int]],
    seed: int,
    progress: Progress,
    device: Specimen | None = None,
) -> dict[str, Any]:
    """The fields of ``defences[]`` in ``results.json`` for one setting at one cut.

    ``bytes_ratio`` is of what is sent; what comes back has no defence. ``speed_ratio`` is of one step's
    speed without a link. Both are 1 for a defence that costs nothing. ``device`` has the layers of a device
    whose own are not public.
    """
    plain = read(Observer(specimen, cut, wire, Nothing(), seed), texts, progress)
    mine = read(Observer(specimen, cut, wire, defence, seed, device), texts, progress)
    step_s, defence_s = _seconds(specimen, defence)
    return {
        "name": defence.name,
        "setting": defence.setting,
        "cut": str(cut),
        "perplexity": round(math.exp(min(mine.nll, 50)), 3),
        "perplexity_ratio": round(math.exp(min(mine.nll - plain.nll, 50)), 4),
        "agreement": round(float((mine.choices == plain.choices).float().mean()), 4),
        "bytes_ratio": round(
            defence.bytes_ratio(specimen.width, TensorCodec(wire, specimen.width).bytes_per_node), 4
        ),
        "speed_ratio": round(step_s / (step_s + defence_s), 4),
        "device_layers": sum(other.front + other.back for other in defence.cuts(cut))
        / len(defence.cuts(cut)),
        "tokens": len(plain.choices),
        "describes": defence.describe(),
    }


def _logits(specimen: Specimen, seen: Seen) -> torch.Tensor:
    assert seen.down is not None
    down = (seen.down if seen.restored is None else seen.restored).to(specimen.blueprint.precision.dtype)
    return specimen.head(specimen.back(seen.cut).forward(side_by_side([len(down)]), down)).cpu()


def _seconds(specimen: Specimen, defence: Defence) -> tuple[float, float]:
    """Seconds of one token through all layers and the head, and of the defence on it; medians."""
    generator = torch.Generator().manual_seed(0)
    run = specimen.run(range(specimen.layers))
    hidden = specimen.embedding(torch.tensor([0]))
    steps, defences = [], []
    for number in range(REPEATS):
        started = time.perf_counter()
        specimen.head(run.forward(Step(number, 0, ROOT, 0, (ROOT,)), hidden))
        middle = time.perf_counter()
        defence.protect(hidden, 1, generator)
        defences.append(time.perf_counter() - middle)
        steps.append(middle - started)
    return statistics.median(steps), statistics.median(defences)
