"""From tokens to hidden states, and from hidden states to logits."""

from __future__ import annotations

import pytest
import torch

from aparte.config import Compute
from aparte.model.ends import Embedding, Head
from aparte.model.linear import packed_available
from aparte.model.precision import Precision
from running import FLOAT32

PACKED = Compute("packed16", "cpu")


@pytest.fixture(params=["float32", "packed16"])
def precision(request: pytest.FixtureRequest) -> Precision:
    if request.param == "packed16" and not packed_available():
        pytest.skip("this CPU has no packed half-precision kernels")
    return Precision.resolve(PACKED if request.param == "packed16" else FLOAT32)


def test_embeddings_are_scaled_as_the_family_does(precision: Precision) -> None:
    table, tokens = torch.randn(9, 8), torch.tensor([1, 4])
    assert torch.equal(
        Embedding(table, precision, scale=3.0)(tokens), Embedding(table, precision)(tokens) * 3.0
    )
    torch.testing.assert_close(Embedding(table, precision)(tokens).cpu(), table[tokens], atol=1e-2, rtol=1e-2)


def test_a_head_adds_its_bias_and_finishes_as_the_family_does(precision: Precision) -> None:
    weight, bias, hidden = torch.randn(9, 8), torch.randn(9), torch.randn(3, 8)
    head = Head(torch.nn.Identity(), weight, precision, bias=bias, finish=lambda logits: logits.tanh() * 2)
    expected = (hidden @ weight.T + bias).tanh() * 2
    torch.testing.assert_close(head(hidden.to(precision.device)).cpu(), expected, atol=1e-2, rtol=1e-2)
