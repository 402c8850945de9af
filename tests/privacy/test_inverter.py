"""The closed-form inverter against the model it assumes."""

from __future__ import annotations

import torch

from aparte.privacy.inverter import Inverter


def planted(
    noise: float, samples: int = 2000
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """States of a known linear Gaussian model; embeddings, tokens, states, and the true map."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(60, 12, generator=generator)
    map_ = torch.randn(12, 16, generator=generator)
    tokens = torch.randint(60, (samples,), generator=generator)
    spread = torch.linspace(0.1, 3, 16)  # of very different size by dimension
    states = embeddings[tokens] @ map_ + 5 + noise * spread * torch.randn(samples, 16, generator=generator)
    return embeddings, tokens, states, map_


def test_it_finds_planted_tokens() -> None:
    embeddings, tokens, states, _ = planted(noise=0.01)
    inverter = Inverter(states[:1000], tokens[:1000], embeddings)
    assert torch.equal(inverter.scores(states[1000:]).argmax(1), tokens[1000:])


def test_tokens_that_were_never_seen_are_found_by_their_embeddings() -> None:
    embeddings, tokens, states, _ = planted(noise=0.01)
    inverter = Inverter(states[tokens < 40], tokens[tokens < 40], embeddings)
    unseen = tokens >= 40
    assert torch.equal(inverter.scores(states[unseen]).argmax(1), tokens[unseen])


def test_scores_are_log_likelihoods() -> None:
    """Differences between tokens are those of the normal densities with the true map and covariance."""
    embeddings, tokens, states, map_ = planted(noise=1.0, samples=60_000)
    scores = Inverter(states, tokens, embeddings).scores(states[:20]).double()
    covariance = torch.diag(torch.linspace(0.1, 3, 16) ** 2)
    density = [
        torch.distributions.MultivariateNormal(embeddings[token] @ map_ + 5, covariance).log_prob(states[:20])
        for token in range(60)
    ]
    truth = torch.stack(density, dim=1).double()
    likely = truth > truth.max(1, keepdim=True).values - 20
    left = (scores - scores.max(1, keepdim=True).values)[likely]
    right = (truth - truth.max(1, keepdim=True).values)[likely]
    torch.testing.assert_close(left, right, rtol=0.05, atol=0.3)
