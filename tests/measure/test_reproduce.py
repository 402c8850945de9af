"""Both papers run again with a tiny model: sections are kept, and the report says what was found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from aparte.errors import UserError
from aparte.measure.reproduce import ngram, paper_a, scaling, settings
from aparte.measure.reproduce.page import blocks, write_report
from aparte.measure.reproduce.prompts import CATEGORIES, QUESTIONS, REFERENCES
from aparte.measure.reproduce.run import PARTS, SECTIONS, choose, run_sections
from aparte.measure.reproduce.settings import Scale, Settings
from aparte.measure.specbench import TASKS
from cli.command import Command
from running import FLOAT32
from tiny import save_tiny

pytest.importorskip("matplotlib")
pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")

TINY = replace(
    settings.QUICK,
    ngram_tokens=10,
    ngrams=(3, 5),
    transport_tokens=4,
    latency_tokens=6,
    grid="5,15,30x100",
    grid_tokens=6,
    identity_tokens=6,
    provider_tokens=3,
    attacker_tokens=200,
    jacobi_tokens=10,
    questions=2,
    spade_tokens=8,
    lengths=(1, 2),
)
#: Those that start no process of their own, in about a second each.
HERE = ("ngram", "identity", "scaling", "jacobi", "spade", "hyper")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is deep enough for paper A's depths."""
    return save_tiny("llama", tmp_path_factory.mktemp("deep") / "tiny", layers=12)


@pytest.fixture(autouse=True)
def tiny_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "QUICK", TINY)


def quick(folder: Path, **changes: Any) -> Settings:
    return Settings(str(folder), quick=True, compute=FLOAT32, **changes)


def run(chosen: Settings, out: Path, *names: str) -> dict[str, Any]:
    return run_sections(chosen, choose("all", names), out, lambda *_: None)


def check_report(results: dict[str, Any], out: Path) -> None:
    """Every section stands in both forms, with its plots, and neither names this machine's folders."""
    write_report(results, out)
    page = (out / "report.html").read_text(encoding="utf-8")
    text = (out / "report.md").read_text(encoding="utf-8")
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == results
    for section in results["sections"].values():
        assert f"### {section['title']}\n" in text
        assert f"<h3>{section['title']}</h3>" in page
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(pictures) == len(set(pictures)) == page.count("<img ")
    assert set(re.findall(r'src="([^:"]+):', page)) == {"data"}
    for name in pictures:
        assert (out / name).read_text(encoding="utf-8").lstrip().startswith(("<?xml", "<svg"))
    for name in ("report.html", "report.md", "results.json"):
        assert str(out.parent.parent) not in (out / name).read_text(encoding="utf-8")
    assert "Both papers, run again: tiny" in text
    heads = [line.count("|") for line in text.splitlines() if line.startswith("| ")]
    assert heads
    for _, table in (block for block in blocks(results) if block[0] == "table"):
        assert len({len(row) for row in table}) == 1, table


def test_sections_that_need_no_other_process(folder: Path, tmp_path: Path) -> None:
    results = run(quick(folder), tmp_path, *HERE)
    assert list(results["sections"]) == list(HERE)
    check_report(results, tmp_path)
    found = {key: section["result"] for key, section in results["sections"].items()}
    assert found["ngram"]["rows"]["0"]["all"]["mat"] == 1.0
    assert all(row["identical"] for row in found["ngram"]["rows"].values())
    assert found["identity"]["exact"]["identical"] is True
    assert found["identity"]["exact"]["max_logit_diff"] < 1e-3
    assert all(row["identical"] for row in found["jacobi"]["rows"].values())
    sweep = found["spade"]["chain"]["sweep"]
    assert [row["d"] for row in sweep] == [1, 2]
    assert all(row["identical"] for row in sweep)
    assert "bleu1" in found["spade"]["chain"]["summarization"]["spade"]
    # Tokens over time, as in the section's own figures.
    row = found["jacobi"]["rows"]["0"]
    assert row["tok_s"] == pytest.approx(1e3 * row["mat"] / row["step_ms"], rel=1e-3)
    assert row["step_ms"] > 80


class TestKept:
    def test_what_is_finished_is_not_run_again(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = run(quick(folder), tmp_path, "scaling")
        monkeypatch.setattr(scaling, "run", lambda lab: pytest.fail("was finished"))
        again = run(quick(folder), tmp_path, "scaling", "hyper")
        assert again["sections"]["scaling"] == first["sections"]["scaling"]
        assert list(again["sections"]) == ["scaling", "hyper"]

    def test_an_interrupted_run_goes_on(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(lab: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ngram, "run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(quick(folder), tmp_path, "ngram", "scaling")
        # Cut in the middle of a line, as by a full disk.
        file = tmp_path / PARTS / "finished.jsonl"
        file.write_text(file.read_text(encoding="utf-8") + '{"key": "section sca', encoding="utf-8")
        assert set(run(quick(folder), tmp_path, "scaling")["sections"]) == {"scaling"}

    def test_other_settings_are_refused(self, folder: Path, tmp_path: Path) -> None:
        run(quick(folder), tmp_path, "scaling")
        for other in (quick(folder, seed=1), Settings(str(folder), compute=FLOAT32)):
            with pytest.raises(UserError, match="holds a run with other settings"):
                run(other, tmp_path, "scaling")

    def test_two_at_once_are_refused(self, folder: Path, tmp_path: Path) -> None:
        run(quick(folder), tmp_path, "scaling")
        with FileLock(tmp_path / PARTS / "lock"), pytest.raises(UserError, match="Another run"):
            run(quick(folder), tmp_path, "scaling")


class TestSections:
    def test_papers(self) -> None:
        assert [section.KEY for section in choose("paper-b")] == ["spade", "hyper"]
        assert len(choose("paper-a")) == len(SECTIONS) - 1
        assert choose("all") == SECTIONS
        with pytest.raises(UserError, match="Unknown section 'spade'"):
            choose("paper-a", ["spade"])

    @pytest.mark.parametrize("section", SECTIONS, ids=lambda section: str(section.KEY))
    def test_each_is_a_module_with_all_names(self, section: ModuleType) -> None:
        for name in ("KEY", "TITLE", "PAPER", "WHAT", "run", "tables", "figures", "differences"):
            assert hasattr(section, name)

    def test_keys_and_titles_differ(self) -> None:
        assert len({section.KEY for section in SECTIONS}) == len(SECTIONS)
        assert len({section.TITLE for section in SECTIONS}) == len(SECTIONS)

    def test_the_plan_has_the_papers_models(self, folder: Path, tmp_path: Path) -> None:
        rows = run(quick(folder), tmp_path, "scaling")["sections"]["scaling"]["result"]["rows"]
        assert list(rows) == list(paper_a.SCALING)
        assert rows["mistral-nemo-12b"]["device_weights_gb"] == pytest.approx(4.9, rel=0.05)
        assert [row["bytes_per_token"] for row in rows.values()] == [8192, 10240, 16384, 32768]


class TestPrompts:
    def test_they_cover_the_papers_kinds(self) -> None:
        assert list(CATEGORIES) == list(paper_a.CATEGORY)
        assert {question.task for question in QUESTIONS} == set(TASKS)
        assert {question.task for question in QUESTIONS[:6]} == set(TASKS)
        summaries = {question.id for question in QUESTIONS if question.task == "summarization"}
        assert set(REFERENCES) == summaries

    def test_a_full_run_is_more_of_everything(self) -> None:
        full = Scale()
        assert full.ngram_tokens * full.prompts_per_category > TINY.ngram_tokens
        assert full.ngrams == tuple(n for n in paper_a.NGRAM["7B"] if n)


class TestCommand:
    def test_it_writes_a_report(self, aparte: Command, folder: Path, tmp_path: Path) -> None:
        words = ("--model", folder, "--quick", "--dtype", "float32", "--device", FLOAT32.device)
        result = aparte(
            "reproduce", "paper-a", *words, "--only", "scaling,hyper", "--out", tmp_path, "--json"
        )
        assert result.code == 0, result.err
        assert set(result.json["sections"]) == {"scaling", "hyper"}
        assert "Device weights" in result.err
        assert (tmp_path / "report.html").exists()
        assert (tmp_path / "scaling.svg").exists()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("paper-c", "--out", "x"), "Unknown paper"),
            (("all",), "--out"),
            (("all", "--only", "speed", "--out", "x"), "Unknown section"),
            (("all", "--data", "none.jsonl", "--out", "x"), "cannot be read"),
            (("all", "--cut", "0,1", "--out", "x"), "Cut 0,1"),
        ],
    )
    def test_mistakes(
        self,
        aparte: Command,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        words: tuple[str, ...],
        message: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = aparte("reproduce", *words)
        assert result.code == 2
        assert message in result.err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_everything(folder: Path, tmp_path: Path) -> None:
    """All sections, those over emulated links and with servers of their own too."""
    results = run(quick(folder), tmp_path)
    assert [section.KEY for section in SECTIONS] == list(results["sections"])
    check_report(results, tmp_path)
    found = {key: section["result"] for key, section in results["sections"].items()}
    rows = found["transport"]["rows"]
    assert rows["http_new"]["step_ms"] > 160 > rows["http_kept"]["step_ms"] > 80
    assert found["latency"]["accounted"] == pytest.approx(1, abs=0.02)
    assert found["providers"]["rows"]["direct"]["relayed"] is False
    assert found["providers"]["rows"]["relayed"]["relayed"] is True
    assert len(found["projection"]["folds"]) == 6
