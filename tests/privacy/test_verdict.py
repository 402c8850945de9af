"""What audits found is told, for the model, cut and defence that it is true of, and for no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aparte.config import Compute, Cut
from aparte.model.parts import Blueprint
from aparte.privacy.verdict import Verdict, keep, recall
from tiny import save_tiny

CUT = Cut(2, 2)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def blueprint(llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, Compute("float32", "cpu"))


def row(
    name: str, top1: float, target: str = "prompt", defence: str = "none", cut: str = "2,2"
) -> dict[str, Any]:
    return {"name": name, "cut": cut, "defence": defence, "target": target, "top1": top1}


def test_the_best_attack_counts_and_baselines_do_not(blueprint: Blueprint) -> None:
    rows = [
        row("vocabulary", 0.9876),
        row("mlp", 0.4),
        row("lm_only", 1.0),
        row("completion", 0.5, "answer"),
        row("traffic", 1.0, "which prompt"),
        row("linear", 0.2, defence="int4"),
    ]
    keep(blueprint, {"attacks": rows})
    assert recall(blueprint, CUT) == Verdict(0.9876, 0.5)
    assert recall(blueprint, CUT, "int4") == Verdict(0.2, None)


def test_a_later_audit_can_only_make_it_worse(blueprint: Blueprint) -> None:
    keep(blueprint, {"attacks": [row("vocabulary", 0.9)]})
    keep(blueprint, {"attacks": [row("vocabulary", 0.5), row("completion", 0.7, "answer")]})
    assert recall(blueprint, CUT) == Verdict(0.9, 0.7)


def test_it_is_of_one_cut_defence_and_model(blueprint: Blueprint, tiny_folders: dict[str, Path]) -> None:
    keep(blueprint, {"attacks": [row("vocabulary", 0.9)]})
    assert recall(blueprint, Cut(1, 2)) is None
    assert recall(blueprint, CUT, "int8") is None
    other = Blueprint.open(tiny_folders["mistral"], Compute("float32", "cpu"))
    assert recall(other, CUT) is None


def test_other_weights_are_another_model(blueprint: Blueprint, tmp_path: Path) -> None:
    keep(blueprint, {"attacks": [row("vocabulary", 0.9)]})
    other = Blueprint.open(save_tiny("llama", tmp_path / "other", seed=1), Compute("float32", "cpu"))
    assert recall(other, CUT) is None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"none": 3}', '{"none": {"prompt": "x"}}', '{"none": {"prompt": 7}}']
)
def test_a_damaged_file_is_none(blueprint: Blueprint, cache: Path, content: str) -> None:
    keep(blueprint, {"attacks": [row("vocabulary", 0.9)]})
    (file,) = (cache / "audits").iterdir()
    file.write_text(content, encoding="utf-8")
    assert recall(blueprint, CUT) is None


def test_a_cache_that_cannot_be_written_is_no_error(
    blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "file"))
    keep(blueprint, {"attacks": [row("vocabulary", 0.9)]})
    assert recall(blueprint, CUT) is None


def test_the_sentence() -> None:
    assert "recovered 98.8 % of the prompt and 50.0 % of the answer" in Verdict(0.9876, 0.5).sentence("none")
    only = Verdict(None, 0.5).sentence("int8")
    assert "with int8" in only
    assert "prompt" not in only
