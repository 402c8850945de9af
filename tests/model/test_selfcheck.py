"""A family that nobody listed is run if a small model like it computes the same in parts, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from aparte.errors import CheckpointError
from aparte.model import selfcheck
from aparte.model.families import FAMILIES, UnfitError
from aparte.model.parts import Blueprint
from aparte.step import ROOT, Step, chain_parents
from running import FLOAT32
from tiny import VARIANTS, tiny_model

LAYERS = 3


def test_a_family_that_passes_is_exact(tmp_path: Path) -> None:
    model: Any = tiny_model("stablelm", layers=LAYERS, layer_norm_eps=1e-5)
    model.save_pretrained(tmp_path)
    blueprint = Blueprint.open(tmp_path, FLOAT32)
    assert not blueprint.family.known
    stage, (embed, head) = blueprint.stage(range(LAYERS)), blueprint.ends()
    assert not stage.shares_passes
    tokens = torch.arange(3, 40)
    step = Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, len(tokens)))
    logits = head(stage.forward(stage.new_cache(), step, embed(tokens)))
    torch.testing.assert_close(logits.cpu(), model(tokens[None]).logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["cohere", "granite", "gemma"])
def test_a_family_that_does_more_than_can_be_seen_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Factors on embeddings and logits are in the model's program only."""
    family = VARIANTS[name][0]
    tiny_model(name, layers=LAYERS).save_pretrained(tmp_path)
    Blueprint.open(tmp_path, FLOAT32)
    monkeypatch.delitem(FAMILIES, family)
    with pytest.raises(CheckpointError, match=rf"'{family}'.*other logits in parts"):
        Blueprint.open(tmp_path, FLOAT32)


def test_a_family_whose_tensors_are_stored_under_other_names_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_model("mixtral", layers=LAYERS).save_pretrained(tmp_path)
    monkeypatch.delitem(FAMILIES, "mixtral")
    with pytest.raises(CheckpointError, match=r"'mixtral'.*name their tensors otherwise"):
        Blueprint.open(tmp_path, FLOAT32)


@pytest.mark.parametrize("name", ["llama-3.1", "mixtral", "gemma2", "gemma3", "gpt-neox", "cohere2"])
def test_listed_families_would_pass(name: str) -> None:
    family, settings = VARIANTS[name]
    layers = {"num_hidden_layers": len(settings.get("layer_types", range(5)))}
    selfcheck.check(AutoConfig.for_model(family, **settings, **layers))


def test_a_mistake_in_the_path_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is one too long, which only a sequence beyond it shows."""
    from aparte.model import parts

    true = parts.windows_of
    monkeypatch.setattr(
        parts, "windows_of", lambda config: [window and window + 1 for window in true(config)]
    )
    config = AutoConfig.for_model("mistral", sliding_window=64, num_hidden_layers=2, rope_theta=5e3)
    with pytest.raises(UnfitError, match="other logits"):
        selfcheck.check(config)


def test_the_small_model_is_small_and_of_the_same_kind() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=34, num_attention_heads=8)
    small = selfcheck.shrunk(config)
    assert (small.hidden_size, small.num_hidden_layers, small.sliding_window) == (64, 12, 8)
    assert small.layer_types == config.layer_types[:12]
    assert small.query_pre_attn_scalar == config.query_pre_attn_scalar
    assert config.num_hidden_layers == 34
