"""Gradient-based inversion: find embeddings whose states match those received, by descent.

Sources: PIA (arXiv 2503.09022) and the optimisation attacks of arXiv 2507.16372: minimise the distance of
the states by descent, take the tokens whose embeddings are nearest, and choose among those from left to
right by the states that they give. Assumptions: weights of the front, or of a public front that the
device's was trained from; the distance is then the attack's only guide. Cost: a few hundred passes of the
front forwards and backwards per text. No text of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from aparte.config import Cut
from aparte.privacy.attack import Case, Recovered, Target
from aparte.privacy.defences import Pinned
from aparte.privacy.matching import Prefix, relative
from aparte.privacy.metrics import RANKS
from aparte.privacy.observe import Seen
from aparte.privacy.specimen import Specimen

#: Nearest tokens to choose among at each position, as in PIA.
CANDIDATES = 10


class Front(nn.Module):
    """The public embedding and first layers in float32, through which gradients flow."""

    def __init__(self, specimen: Specimen, layers: int) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        folder = specimen.blueprint.checkpoint.folder
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()  # it would list all the layers that are left out on purpose
        logging.disable_progress_bar()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
        decoder = model.get_decoder().eval().requires_grad_(False)
        decoder.norm = nn.Identity()
        self._decoder = decoder.to(specimen.blueprint.precision.device)

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        """``[B, T, D] -> [B, T, D]``: the states after the last of the layers."""
        states: torch.Tensor = self._decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return states


class Gradient:
    """Embeddings by descent, tokens by the nearest embedding."""

    name = "gradient"
    target: Target = "prompt"
    threat = "public"
    source = "PIA, arXiv 2503.09022; arXiv 2507.16372."
    assumes = "Weights of the front, or of one near it; no text."
    cost = "Hundreds of forward and backward passes of the front per text."

    def __init__(self, seconds: float = 600.0, steps: int = 300, texts: int = 16) -> None:
        self._seconds = seconds
        self._steps = steps
        self.texts = texts

    def run(self, case: Case) -> Recovered:
        started = time.perf_counter()
        specimen = case.observer.specimen
        embeddings = specimen.embeddings().to(specimen.blueprint.precision.device)
        # The cut is not known where it is drawn by session; the attack then tries the middle one.
        cuts = case.observer.defence.cuts(case.observer.cut)
        cut = cuts[len(cuts) // 2]
        guesses = self._descend(case, cut, embeddings, case.victims[: self.texts])
        return Recovered(guesses, 0, time.perf_counter() - started)

    def _descend(
        self, case: Case, cut: Cut, embeddings: torch.Tensor, victims: Sequence[Seen]
    ) -> list[torch.Tensor]:
        front = Front(case.observer.specimen, cut.front)
        device = embeddings.device
        received = nn.utils.rnn.pad_sequence([seen.up.float() for seen in victims], batch_first=True).to(
            device
        )
        there = (
            torch.arange(received.shape[1]) < torch.tensor([len(seen.tokens) for seen in victims])[:, None]
        )
        there = there.to(device)  # [B, T]
        # Dimensions differ a hundredfold in size; each counts alike.
        spread = received[there].std(0, unbiased=False).clamp_min(1e-6)
        with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(case.seed)
            size = float(embeddings.std())
            mean = embeddings.mean(0)
            guess = (mean + 0.1 * size * torch.randn(received.shape, device=device)).requires_grad_()
            optimiser = torch.optim.Adam([guess], lr=0.1 * size, betas=(0.9, 0.98))
            ended = time.perf_counter() + self._seconds
            for step in range(self._steps):
                left = 1 - step / self._steps
                optimiser.param_groups[0]["lr"] = size * (0.02 + 0.1 * left)
                optimiser.zero_grad(set_to_none=True)
                difference = ((front(guess) - received) / spread)[there]
                loss = nn.functional.huber_loss(difference, torch.zeros_like(difference))
                torch.autograd.backward(loss)
                optimiser.step()
                case.progress("gradient inversion", step, self._steps)
                if time.perf_counter() > ended:
                    break
            case.progress("gradient inversion", self._steps, self._steps)
        found = guess.detach()
        table = nn.functional.normalize(embeddings - mean, dim=1)
        guesses = []
        for row, seen in zip(found, victims, strict=True):
            near = nn.functional.normalize(row[: len(seen.tokens)] - mean, dim=1) @ table.T
            guesses.append(_pick(case, cut, near.topk(CANDIDATES).indices.cpu(), seen))
        return guesses


def _pick(case: Case, cut: Cut, near: torch.Tensor, seen: Seen) -> torch.Tensor:
    """From left to right, of the tokens ``near`` ``[T, C]`` those whose states in the front are nearest."""
    observer = case.observer
    prefix = Prefix(observer.specimen, cut, Pinned(observer.defence, cut))
    ranked = []
    for tokens, received in zip(near, seen.up, strict=True):
        order = relative(prefix.siblings(tokens), received).argsort()
        prefix.keep(int(order[0]))
        ranked.append(tokens[order[:RANKS]])
    return torch.stack(ranked)
