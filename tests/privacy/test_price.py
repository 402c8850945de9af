"""What defences cost."""

from __future__ import annotations

import math

import pytest
import torch

from aparte.privacy.defences import Noise, Nothing, Quantised
from aparte.privacy.observe import Observer
from aparte.privacy.price import price, read
from aparte.privacy.specimen import Specimen
from privacy.conftest import CUT, random_texts
from tiny import tiny_model

TEXTS = random_texts(4, seed=21)


def nothing_to_see(label: str, done: int, total: int) -> None:
    pass


def test_no_defence_costs_nothing(specimen: Specimen) -> None:
    row = price(specimen, CUT, "float16", Nothing(), TEXTS, 0, nothing_to_see)
    assert (row["perplexity_ratio"], row["agreement"], row["bytes_ratio"]) == (1, 1, 1)
    assert row["speed_ratio"] > 0.9


def test_perplexity_is_that_of_the_unsplit_model(specimen: Specimen) -> None:
    reading = read(Observer(specimen, CUT, "float32", Nothing()), TEXTS, nothing_to_see)
    model, losses = tiny_model("llama"), []
    for text in TEXTS:
        logits = model(torch.tensor([text])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="none"))
    assert reading.nll == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4)


def test_coarser_numbers_agree_less(specimen: Specimen) -> None:
    rows = [
        price(specimen, CUT, "float16", Quantised(bits=bits), TEXTS, 0, nothing_to_see) for bits in (8, 4, 2)
    ]
    agreements = [row["agreement"] for row in rows]
    assert agreements == sorted(agreements, reverse=True)
    assert agreements[0] > agreements[-1]
    assert [row["bytes_ratio"] for row in rows] == pytest.approx([34 / 64, 18 / 64, 10 / 64], abs=1e-4)


def test_heavy_noise_costs_the_text(specimen: Specimen) -> None:
    noise = Noise(epsilon=0.1)
    noise.calibrate(torch.ones(9, 32), torch.ones(9, 32))
    row = price(specimen, CUT, "float16", noise, TEXTS, 0, nothing_to_see)
    assert row["agreement"] < 0.3
    assert math.isfinite(row["perplexity_ratio"])
    assert "epsilon 0.1" in row["describes"]
