"""bench step: every run is measured, and the ratios follow from the rows."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aparte.cli.app import app
from aparte.measure.step_cost import Report, Row, in_turns, tree

ROOT_DIR = Path(__file__).parents[2]


def test_the_command_measures_every_size(llama_folder: Path) -> None:
    options = ["--nodes", "1,8,1", "--context", "20", "--repeats", "1", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, ["bench", "step", str(llama_folder), *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["nodes"] for row in report["rows"]] == [1, 8]
    assert all(value > 0 for row in report["rows"] for value in row.values())
    assert set(report["ratio_vs_transformers"]) == {"1", "8"}
    assert report["window_8_over_1"] > 0
    assert report["context_4096_over_256"] is None  # the tiny model's context is 512
    documented = (ROOT_DIR / "docs" / "cli.md").read_text(encoding="utf-8").split("## `aparte bench step`")[1]
    words = set(re.findall(r"`(\w+)(?:\[\])?`", documented.split("\n## ")[0]))
    assert words >= {*report, *report["rows"][0]}


@pytest.mark.parametrize(
    ("options", "words"), [(["--nodes", "1,x"], "--nodes 1,x"), (["--context", "505"], "context is 512")]
)
def test_what_cannot_be_measured_is_refused(llama_folder: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "step", str(llama_folder), *options])
    assert result.exit_code != 0
    assert words in str(result.exception)


def test_ratios() -> None:
    rows = [Row(1, 10, 2, 0, 0, 36), Row(8, 15, 3, 0, 0, 90)]
    report = Report(rows, 1.5).to_dict()
    assert report["ratio_vs_transformers"] == {"1": 3.0, "8": 5.0}
    assert report["window_8_over_1"] == 1.5
    assert Report(rows[:1], None).to_dict()["window_8_over_1"] is None
    assert set(report["rows"][0]) == {field.name for field in fields(Row)}


def test_runs_take_turns_and_the_first_one_does_not_count() -> None:
    import torch

    calls: list[str] = []
    runs = {(1, name): (lambda name=name: calls.append(name)) for name in "ab"}
    medians = in_turns(runs, 2, torch.device("cpu"))
    assert calls == list("ababab")
    assert set(medians) == {(1, "a"), (1, "b")}


def test_the_tree_is_binary() -> None:
    assert tree(6, 299) == (299, 300, 300, 301, 301, 302)
