"""The benchmark's bookkeeping, and a run over questions of our own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from aparte.errors import UserError
from aparte.measure.specbench import TASKS, balanced, fingerprint, load_questions, summarize
from cli.command import Command

CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag", "writing", "coding")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [
        {
            "question_id": str(number),
            "category": category,
            "turns": ["the cat and the dog", "and then"] if category == "coding" else ["the cat " * 3],
        }
        for number, category in enumerate(CATEGORIES * 3)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


def test_a_subset_is_balanced_and_drawn_by_the_seed(questions: Path) -> None:
    everything = load_questions(questions)
    assert len(everything) == 21
    picked = balanced(everything, 12, seed=0)
    assert Counter(question.task for question in picked) == dict.fromkeys(TASKS, 2)
    assert picked == balanced(everything, 12, seed=0)
    assert fingerprint(picked) != fingerprint(balanced(everything, 12, seed=1))
    assert len(balanced(everything, None, seed=0)) == len(balanced(everything, 100, seed=0)) == 21


@pytest.mark.parametrize(
    "text", ["", "not json", '{"question_id": 1}', '{"question_id": 1, "category": "qa", "turns": 5}']
)
def test_what_is_no_question_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(UserError, match=r"bad\.jsonl"):
        load_questions(file)


def row(task: str, tokens: int, steps: int, seconds: float) -> dict[str, object]:
    side = {
        "tokens": tokens,
        "steps": steps,
        "drafted": 2 * steps,
        "accepted_drafts": tokens - steps,
        "seconds": seconds,
        "bytes_up": 10,
        "bytes_down": 20,
    }
    plain = side | {"steps": tokens, "seconds": 2 * seconds}
    return {"id": task, "task": task, "speculative": side, "sequential": plain}


def test_the_macro_average_counts_each_task_once() -> None:
    rows = [row("qa", 100, 50, 10), row("qa", 100, 50, 10), row("rag", 60, 20, 5)]
    report = summarize(rows)
    assert report["categories"]["qa"]["mat"] == 2.0
    assert report["categories"]["rag"]["mat"] == 3.0
    assert report["macro"]["mat"] == 2.5
    assert report["macro"]["speedup"] == 2.0
    assert report["categories"]["rag"]["wasted_share"] == 0.0
    assert report["categories"]["qa"]["nodes_per_step"] == 2.0


def test_a_run_reports_and_resumes(
    aparte: Command, llama_folder: Path, questions: Path, tmp_path: Path
) -> None:
    finished = tmp_path / "rows.jsonl"
    base = ("bench", "specbench", llama_folder, "--data", questions, "--limit", 6, "--max-new-tokens", 8)
    exact = ("--dtype", "float32", "--wire", "float32", "--resume", finished, "--json")
    first = aparte(*base, *exact)
    assert first.code == 0
    data = first.json
    assert data["identical"] is True
    assert data["cold"] is True
    assert data["link"] == {"rtt_ms": None, "mbps": None}
    assert set(data["categories"]) == set(TASKS)
    assert data["macro"].keys() >= {"mat", "speedup", "tok_s", "nodes_per_step"}
    assert data["macro"]["mat"] >= 1.0
    # Half of the rows are there already: the figures of those are kept, the others measured anew.
    lines = finished.read_text().splitlines()
    assert len(lines) == 7
    finished.write_text("\n".join(lines[:4]) + "\n")
    again = aparte(*base, *exact)
    assert again.code == 0
    assert finished.read_text().splitlines()[:4] == lines[:4]
    assert len(finished.read_text().splitlines()) == 7
    other = aparte(*base, *exact, "--seed", 1)
    assert other.code == 2
    assert "other settings" in other.err


def test_warm_keeps_what_was_learned(aparte: Command, llama_folder: Path, questions: Path) -> None:
    base = ("bench", "specbench", llama_folder, "--data", questions, "--limit", 12, "--max-new-tokens", 12)
    options = ("--no-baseline", "--max-nodes", 16, "--json")
    cold, warm = aparte(*base, *options).json, aparte(*base, *options, "--warm").json
    assert "identical" not in cold
    assert warm["cold"] is False
    assert warm["macro"]["mat"] >= cold["macro"]["mat"]
