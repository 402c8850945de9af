"""bench step: every run is measured, and the ratios follow from the rows."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from aparte.cli.app import app
from aparte.config import Cut
from aparte.measure.step_cost import ContextRow, Report, Row, Side, by_context, in_turns, tree
from aparte.model.cache import SlotCache
from aparte.model.parts import Blueprint
from aparte.model.stage import Stage
from aparte.step import Step
from running import FLOAT32

ROOT_DIR = Path(__file__).parents[2]


def test_the_command_measures_every_size(llama_folder: Path) -> None:
    options = ["--nodes", "1,8,1", "--context", "20", "--contexts", "64,512,1", "--repeats", "1"]
    options += ["--device", "cpu", "--json"]
    result = CliRunner().invoke(app, ["bench", "step", str(llama_folder), *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["nodes"] for row in report["rows"]] == [1, 8]
    assert all(value > 0 for row in report["rows"] for value in row.values())
    assert set(report["ratio_vs_transformers"]) == {"1", "8"}
    assert report["window_8_over_1"] > 0
    assert [row["context"] for row in report["contexts"]] == [64, 512, 1]
    assert all(value > 0 for row in report["contexts"] for value in row.values())
    assert report["contexts"][2]["over_shortest"] == 1
    assert report["context_4096_over_256"] is None  # the tiny model's context is 512
    documented = (ROOT_DIR / "docs" / "cli.md").read_text(encoding="utf-8").split("## `aparte bench step`")[1]
    words = set(re.findall(r"`(\w+)(?:\[\])?`", documented.split("\n## ")[0]))
    assert words >= {*report, *report["rows"][0], *report["contexts"][0]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "1,x"], "--nodes 1,x"),
        (["--context", "505"], "context is 512"),
        (["--contexts", "0,256"], "--contexts 0,256"),
        (["--contexts", "256,513"], "smaller --contexts"),
    ],
)
def test_what_cannot_be_measured_is_refused(llama_folder: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "step", str(llama_folder), *options])
    assert result.exit_code != 0
    assert words in str(result.exception)


def test_lengths_of_text_go_as_far_as_the_context(llama_folder: Path) -> None:
    options = ["--nodes", "1", "--context", "1", "--repeats", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "step", str(llama_folder), *options, "--json"])
    assert [row["context"] for row in json.loads(result.stdout)["contexts"]] == [256]
    shown = CliRunner().invoke(app, ["bench", "step", str(llama_folder), *options])
    assert "One node, by tokens of text" in shown.output
    assert "over 256" in shown.output


def test_the_context_is_that_of_the_step(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that is measured is the last one of the text, not one after it."""
    steps: dict[int, int] = {}

    def forward(self: Stage, cache: SlotCache, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        original(self, cache, step, hidden)
        steps[cache.tree.rows] = max(steps.get(cache.tree.rows, 0), *cache.tree.positions(step.slots))
        return hidden

    original = Stage.forward
    monkeypatch.setattr(Stage, "forward", forward)
    side = Side(Blueprint.open(llama_folder, FLOAT32), Cut(1, 1), None)
    assert [row.context for row in by_context(side, [5, 1, 300], 1, torch.device("cpu"))] == [5, 1, 300]
    assert {rows: place for rows, place in steps.items() if rows in (1, 5, 300)} == {1: 0, 5: 4, 300: 299}


def test_ratios() -> None:
    rows = [Row(1, 10, 2, 0, 0, 36), Row(8, 15, 3, 0, 0, 90)]
    contexts = [ContextRow(4096, 12, 6), ContextRow(256, 8, 4)]
    report = Report(rows, contexts).to_dict()
    assert [row["over_shortest"] for row in report["contexts"]] == [1.5, 1.0]
    assert report["context_4096_over_256"] == 1.5
    assert Report(rows, contexts[:1]).to_dict()["context_4096_over_256"] is None
    assert Report(rows, []).to_dict()["contexts"] == []
    assert report["ratio_vs_transformers"] == {"1": 3.0, "8": 5.0}
    assert report["window_8_over_1"] == 1.5
    assert Report(rows[:1], []).to_dict()["window_8_over_1"] is None
    assert set(report["rows"][0]) == {field.name for field in fields(Row)}


def test_runs_take_turns_and_the_first_one_does_not_count() -> None:
    calls: list[str] = []
    runs = {(1, name): (lambda name=name: calls.append(name)) for name in "ab"}
    medians = in_turns(runs, 2, torch.device("cpu"))
    assert calls == list("ababab")
    assert set(medians) == {(1, "a"), (1, "b")}


def test_the_tree_is_binary() -> None:
    assert tree(6, 299) == (299, 300, 300, 301, 301, 302)
