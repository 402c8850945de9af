"""The report says what the results say, and the best attack counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aparte.privacy.report import verdict, write_report


def attack(name: str, top1: float, defence: str = "none", target: str = "prompt") -> dict[str, Any]:
    shares = dict.fromkeys(("top5", "exact", "rouge_l", "bleu"), top1)
    return {
        "name": name, "cut": "2,2", "defence": defence, "target": target, "top1": top1, **shares,
        "pii_recall": None, "pii": {}, "tokens": 100, "attacker_tokens": 880, "seconds": 1.0,
    }  # fmt: skip


def results() -> dict[str, Any]:
    price = {
        "name": "quantised", "setting": "int8", "cut": "2,2", "perplexity": 9.0, "perplexity_ratio": 1.01,
        "agreement": 0.9, "bytes_ratio": 0.5, "speed_ratio": 1.0, "device_layers": 4.0, "tokens": 10,
        "describes": "Rounds <b>numbers</b>.",
    }  # fmt: skip
    attacks = [
        attack("lm_only", 0.99),
        attack("mlp", 0.3),
        attack("vocabulary", 0.97),
        attack("mlp", 0.2, "int8"),
        attack("vocabulary", 0.95, "int8"),
        attack("completion", 1.0, target="answer"),
    ]
    return {
        "model": "a <model>", "layers": 6, "cuts": ["2,2"], "wire": "float16", "dtype": "float32", "seed": 0,
        "quick": True, "text": ["mine.txt"], "victims": 3, "seconds": 9.0,
        "attacks": attacks, "defences": [price],
    }  # fmt: skip


def test_the_best_attack_counts_and_no_baseline_does() -> None:
    first, second, third, frontier = verdict(results())
    assert "(vocabulary, cut 2,2) recovered 97.0 % of the tokens of the prompt" in first
    assert "(completion, cut 2,2) recovered 100.0 % of the tokens of the answer" in second
    assert "int8 at cut 2,2: 95.0 % by vocabulary" in third
    assert "(int8, cut 2,2) still gives away 95.0 %" in frontier


def test_a_defence_that_costs_the_text_is_not_called_one_that_keeps_it() -> None:
    found = results()
    found["defences"][0]["perplexity_ratio"] = 1.03
    assert verdict(found)[-1] == "No setting that was measured keeps perplexity within 2.0 %."


def test_what_is_unfinished_is_said(tmp_path: Path) -> None:
    write_report(results() | {"unfinished": 5}, tmp_path)
    assert "5 of its parts are not finished" in (tmp_path / "report.md").read_text(encoding="utf-8")
    write_report(results(), tmp_path)
    assert "not finished" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_in_and_out_of_domain(tmp_path: Path) -> None:
    found = results()
    for trained, tested, share in (("a", "a", 0.9), ("a", "b", 0.5), ("b", "a", 0.45), ("b", "b", 0.8)):
        found["attacks"].append(attack("mlp", share) | {"trained_on": trained, "tested_on": tested})
    write_report(found, tmp_path)
    told = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| trained on | tokens | tested on a | tested on b |" in told
    assert "| a | 880 | 90.0 % | 50.0 % |" in told
    assert "| b | 880 | 45.0 % | 80.0 % |" in told
    assert "| 2 | 58.8 % | 30.0 % |" in told, "which stays the figure of text of all domains"


def test_text_is_escaped_and_figures_are_there(tmp_path: Path) -> None:
    write_report(results(), tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a &lt;model&gt;" in page
    assert "<b>" not in page
    assert "<td>30.0 %</td>" in page
    told = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| 2 | 58.8 % | 30.0 % |" in told, "the paper's figure beside ours"
