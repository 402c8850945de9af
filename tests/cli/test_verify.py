from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import Command


def test_the_report_has_the_agreed_fields(aparte: Command, tiny_folder: Path) -> None:
    result = aparte("verify", tiny_folder, "--max-new-tokens", 12, "--json")
    assert result.code == 0
    data = result.json
    assert data["identical_share"] == 1.0
    assert data["identical"] is True
    assert data["max_logit_diff"] < 1e-3
    perplexity = data["self_perplexity"]
    assert perplexity["sequential"] == pytest.approx(perplexity["speculative"], abs=1e-3)
    assert perplexity["sequential"] == pytest.approx(perplexity["unsplit"], abs=1e-3)
    assert data["prompts"] == 12
    assert (data["dtype"], data["wire"]) == ("float32", "float32")


def test_prompts_from_files(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("the cat\n\nthe dog\n")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "the cat"}) + "\n")
    base = ("verify", llama_folder, "--max-new-tokens", 4, "--json")
    assert aparte(*base, "--prompts", text).json["prompts"] == 2
    assert aparte(*base, "--prompts", lines).json["prompts"] == 1
    lines.write_text("not json\n")
    assert aparte(*base, "--prompts", lines).code == 2
    assert aparte(*base, "--prompts", tmp_path / "missing").code == 2


def test_plain_output(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\n")
    result = aparte("verify", llama_folder, "--prompts", prompts, "--max-new-tokens", 4)
    assert result.code == 0
    assert "self-perplexity" in result.out
    assert "all answers: yes" in result.err


def test_a_difference_is_found(
    aparte: Command, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command fails when the split model writes something else: here, with a perturbed middle."""
    import aparte.model.stage as stage

    original = stage.Stage.forward

    def perturbed(self: stage.Stage, *arguments: object) -> object:
        output = original(self, *arguments)  # type: ignore[arg-type]
        return output + 0.5 if self.layer_indices.start == 2 else output

    monkeypatch.setattr(stage.Stage, "forward", perturbed)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\nthe dog\nand so on\n")
    result = aparte("verify", llama_folder, "--prompts", prompts, "--max-new-tokens", 16, "--json")
    assert result.code == 1
    assert "must not" in result.err
    assert result.json["identical"] is False
