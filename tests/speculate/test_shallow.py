"""The first layers of the target as its draft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aparte.errors import UserError
from aparte.model.parts import Blueprint
from aparte.speculate.settings import Drafting
from aparte.speculate.shallow import open_shallow
from running import FLOAT32


def test_it_is_the_model_without_its_other_layers(tiny_folder: Path) -> None:
    shallow = open_shallow(Blueprint.open(tiny_folder, FLOAT32), 2, top=5)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, local_files_only=True)
    model.model.layers = model.model.layers[:2]
    tokens = list(range(5, 25))
    guess = shallow.begin(tokens)
    (below,) = shallow.extend([-1], [40])
    assert guess is not None
    for said, text in ((guess, tokens), (below, [*tokens, 40])):
        best = model(torch.tensor([text]), use_cache=False).logits[0, -1].softmax(-1).topk(5)
        assert said.tokens == tuple(best.indices.tolist())
        assert said.probabilities == pytest.approx(best.values.tolist(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("draft", "layers"), [("shallow:6", 6), ("bridge+shallow:12", 12), ("bridge", None)])
def test_names(draft: str, layers: int | None) -> None:
    assert Drafting(draft).layers == layers


@pytest.mark.parametrize("draft", ["shallow:", "shallow:0", "shallow:-1", "shallow:x", "shallow:1.5"])
def test_names_that_say_no_number(draft: str) -> None:
    with pytest.raises(UserError, match="shallow:"):
        Drafting(draft)


@pytest.mark.parametrize("layers", [6, 7])
def test_more_layers_than_can_be_left_out(llama_folder: Path, layers: int) -> None:
    with pytest.raises(UserError, match="K must be 1 to 5"):
        open_shallow(Blueprint.open(llama_folder, FLOAT32), layers)
