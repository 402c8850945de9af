"""A closed-form inverter: which tokens most probably lie behind a hidden state, by a linear Gaussian model.

Source: Gaussian discriminants with one shared covariance, the means a linear map of the public embedding;
the role of the proposal policy in SipIt (arXiv 2510.15511) and of the language model in arXiv 2505.18332.
Assumptions: the public embedding, and pairs of tokens and states, which an attacker with the front's
weights makes from any text. Cost: one linear solve of the width; no training loop.

``h = A e(v) + b + noise``, ``noise ~ N(0, S)``: everything that context, layers and defences do to the
state of a token beyond ``A e(v) + b`` counts as noise, so a defence widens ``S`` by itself.
"""

from __future__ import annotations

import torch

#: Share of the average variance that is added to a covariance, so that few samples do not make it singular.
SHRINK = 1e-3


class Inverter:
    """Scores of every token given a state, up to a constant per state: their log-likelihoods."""

    def __init__(self, states: torch.Tensor, tokens: torch.Tensor, embeddings: torch.Tensor) -> None:
        """Fit to ``states`` ``[N, D]`` of ``tokens`` ``[N]``; ``embeddings`` ``[V, D]`` of all tokens."""
        states = states.float()
        size = embeddings.shape[1]
        inputs = torch.cat([embeddings[tokens], torch.ones(len(tokens), 1)], dim=1)  # [N, D+1]
        gram = inputs.T @ inputs
        gram.diagonal()[:size] += 1e-2 * gram.diagonal()[:size].mean()
        weights = torch.linalg.solve(gram, inputs.T @ states)  # [D+1, D]
        residuals = states - inputs @ weights
        covariance = residuals.T @ residuals / len(tokens)
        covariance.diagonal().add_(SHRINK * covariance.diagonal().mean() + 1e-12)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))  # [D, D]
        maps, offset = weights[:-1], weights[-1]
        # log N(h; A e + b, S) = h' S^-1 A e - (A e + b)' S^-1 (A e + b) / 2 + what does not depend on e
        self._embeddings = embeddings
        self._map = inverse @ maps.T  # [D, D]
        curved = embeddings @ (maps @ self._map)  # [V, D]
        linear = embeddings @ (maps @ (inverse @ offset))  # [V]
        self._constants = -0.5 * (curved * embeddings).sum(1) - linear  # [V]

    def scores(self, states: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """``[n, D] -> [n, V]``, or of ``tokens`` ``[c]`` only: ``[n, c]``."""
        constants, embeddings = self._constants, self._embeddings
        if tokens is not None:
            constants, embeddings = constants[tokens], embeddings[tokens]
        return torch.addmm(constants, states.float() @ self._map, embeddings.T)
