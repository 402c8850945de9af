"""The SPADE bench: real answers over a simulated link, and figures that can be checked by hand."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aparte.bridge.file import save_bridge
from aparte.bridge.net import BridgeNet
from aparte.config import Cut, Sampling
from aparte.errors import UserError
from aparte.measure.spade import (
    AHEAD,
    BARE,
    CLOUD,
    COLOCATED,
    EDGE,
    ONE,
    PLAIN,
    RTTS_MS,
    Bench,
    Options,
    load_references,
    parse_lengths,
    parse_sweep,
)
from aparte.measure.spade_baselines import pipelined_cells
from aparte.measure.spade_plot import write_plot
from aparte.measure.spade_report import PAPER, cells, summarize
from aparte.measure.spade_run import Run
from aparte.measure.spade_setup import Sides, open_sides
from aparte.measure.specbench import Question
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.speculate.settings import Drafting
from cli.command import Command
from running import FLOAT32
from tiny import save_tiny

QUESTIONS = (
    Question("1", "qa", ("the cat and the dog",)),
    Question("2", "summarization", ("the cat the cat the cat",)),
)
REFERENCES = {"2": "the cat and the mat"}
TOKENS = 20
needs_scores = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sacrebleu", "rouge_score")),
    reason="sacrebleu and rouge-score (extra: scores) are not installed",
)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib (extra: plots) is not installed"
)


@pytest.fixture
def blueprint(llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, FLOAT32)


def open_tiny(blueprint: Blueprint, draft: str, **more: Any) -> Sides:
    sides = open_sides(blueprint, "tiny", Drafting(draft, accept=more.pop("accept", "coupled")), **more)
    for edge in (sides.edge, sides.bare, sides.plain):
        if edge is not None:
            edge.writer.codec.eos = frozenset()
    return sides


def rows_of(sides: Sides, options: Options, done: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    bench = Bench(sides.edge, sides.bare, options, REFERENCES, sides.plain)
    return list(bench.run(QUESTIONS, done=done))


def runs_of(row: dict[str, Any]) -> dict[str, Run]:
    return {way: Run(**run) for way, run in row["runs"].items()}


class TestRuns:
    @pytest.mark.parametrize(
        "options",
        [
            Options(Sampling(), TOKENS, (1, 3)),
            Options(Sampling(), TOKENS, (2, 6), tree=True),
            Options(Sampling(temperature=0.9, seed=4), TOKENS, (3,)),
        ],
        ids=["greedy", "tree", "coupled"],
    )
    @pytest.mark.parametrize("draft", ["shallow:3", "context"])
    def test_the_text_is_that_of_the_cloud_alone(
        self, blueprint: Blueprint, draft: str, options: Options
    ) -> None:
        for row in rows_of(open_tiny(blueprint, draft), options):
            runs = runs_of(row)
            assert set(runs) == {CLOUD, *map(str, options.lengths), *([EDGE] if draft != "context" else [])}
            for length in options.lengths:
                assert runs[str(length)].digest == runs[CLOUD].digest
                assert runs[str(length)].drafted <= length * runs[str(length)].steps
            assert runs[CLOUD].steps == runs[CLOUD].tokens == TOKENS

    def test_a_draft_that_is_the_model_is_always_right(
        self, blueprint: Blueprint, llama_folder: Path
    ) -> None:
        """Then everything can be counted by hand."""
        again = Blueprint.open(llama_folder, FLOAT32)
        options = Options(Sampling(), TOKENS, (1, 4))
        for row in rows_of(open_tiny(blueprint, "same", draft_model=again), options):
            runs = runs_of(row)
            assert runs[EDGE].digest == runs[CLOUD].digest
            assert runs[EDGE].steps == runs[EDGE].bytes_up == 0
            assert [runs[str(d)].steps for d in (1, 4)] == [TOKENS // 2, TOKENS // 5]
            assert [runs[str(d)].accepted for d in (1, 4)] == [TOKENS // 2, 4 * TOKENS // 5]
            assert runs["4"].rejected == 0

    def test_rejection_sampling_runs_too(self, blueprint: Blueprint, llama_folder: Path) -> None:
        sides = open_tiny(blueprint, "shallow:5", accept="rejection")
        options = Options(Sampling(temperature=1.0, seed=1), TOKENS, (3,), rejection=True)
        rows = rows_of(sides, options)
        assert [runs_of(row)["3"].tokens for row in rows] == [TOKENS, TOKENS]
        report = summarize(rows, (3,), 100.0, {}, exact=False)
        assert report["spade"]["identical"] is None
        assert report["different"] == []

    def test_finished_rows_are_not_measured_again(self, blueprint: Blueprint) -> None:
        sides, options = open_tiny(blueprint, "context"), Options(Sampling(), TOKENS, (2,))
        done = [{"id": "1", "task": "qa", "marker": True}]
        rows = rows_of(sides, options, done)
        assert rows[0] is done[0]
        assert rows[1]["id"] == "2"

    def test_texts_are_kept_only_where_they_are_scored(self, blueprint: Blueprint) -> None:
        first, second = rows_of(open_tiny(blueprint, "context"), Options(Sampling(), TOKENS, (2,)))
        assert not first["scored"]
        assert "text" not in first["runs"][CLOUD]
        assert second["scored"]
        assert second["runs"]["2"]["text"] == second["runs"][CLOUD]["text"] != ""


class TestBaselines:
    """The drafter beside the verifier, and drafting while a block is verified: both are really run."""

    @pytest.mark.parametrize("tree", [False, True])
    def test_beside_the_verifier(self, blueprint: Blueprint, llama_folder: Path, tree: bool) -> None:
        again = Blueprint.open(llama_folder, FLOAT32)
        options = Options(Sampling(), TOKENS, (4,), tree=tree, colocated=(1, 4))
        rows = rows_of(open_tiny(blueprint, "same", draft_model=again), options)
        for row in rows:
            runs = runs_of(row)
            for length in (1, 4):
                run = runs[COLOCATED.format(length)]
                assert run.digest == runs[CLOUD].digest
                assert 0 < run.edge_ms < run.compute_ms
                assert run.compute_ms == pytest.approx(run.wall_ms)  # there is no link
        report = summarize(rows, (4,), 100.0, {}, exact=True)
        first, second = report["colocated"]
        assert (first["d"], second["d"]) == (1, 4)
        if not tree:  # a tree's model rests where it doesn't pay
            assert first["cloud_calls_per_answer"] > second["cloud_calls_per_answer"]
        assert second["draft_ms_per_answer"] > 0
        for row in report["colocated"]:
            assert row["identical"]
            # One round trip per answer, whatever the number of passes.
            slower = 1e3 * TOKENS * (1 / row["tok_s"]["80"] - 1 / row["tok_s"]["0"])
            assert slower == pytest.approx(80, rel=0.02)
        assert report["summarization"]["colocated"][0]["d"] == 1

    @pytest.mark.parametrize("in_flight", [None, 3])
    def test_drafting_on_while_a_block_is_verified(
        self, blueprint: Blueprint, llama_folder: Path, in_flight: int | None
    ) -> None:
        again = Blueprint.open(llama_folder, FLOAT32)
        options = Options(Sampling(), TOKENS, (4,), tree=True, in_flight=in_flight)
        sides = open_tiny(blueprint, "same", draft_model=again)
        rows = list(Bench(sides.edge, sides.bare, options).run(QUESTIONS[:1]))
        report = summarize(rows, (4,), 100.0, {}, exact=True)
        assert [row["rtt_ms"] for row in report["pipelined"]] == list(RTTS_MS)
        for row in report["pipelined"]:
            assert row["identical"]
            assert row["one_at_a_time"]["cloud_calls_per_answer"] > 0
        far = report["pipelined"][-1]
        assert far["one_at_a_time"]["tok_s"] < 1e3 * TOKENS / (150 * TOKENS / 5)
        for row in rows:
            one, ahead = (runs_of(row)[name.format(150)] for name in (ONE, AHEAD))
            assert one.ahead == one.stale == 0
            if in_flight:  # without asking whether it pays; a draft that is the model is right
                assert ahead.ahead > 0
                assert ahead.wall_ms < 0.9 * one.wall_ms
        heads, table = pipelined_cells(report["pipelined"])
        assert all(len(line) == len(heads) for line in table)

    def test_neither_unless_asked_for(self, blueprint: Blueprint) -> None:
        report = summarize(
            rows_of(open_tiny(blueprint, "context"), Options(Sampling(), 4, (2,))),
            (2,),
            100.0,
            {},
            exact=True,
        )
        assert "colocated" not in report
        assert "pipelined" not in report


class TestBatchInvariant:
    """What the option costs the cloud by itself is measured too: savings should not be of its price."""

    def test_the_cloud_without_it_takes_part(self, llama_folder: Path) -> None:
        compute = replace(FLOAT32, batch_invariant=True)
        sides = open_tiny(Blueprint.open(llama_folder, compute), "context")
        assert sides.plain is not None
        rows = rows_of(sides, Options(Sampling(), TOKENS, (2,)))
        alone, plain = (runs_of(rows[0])[way] for way in (CLOUD, PLAIN))
        assert plain.tokens == plain.steps == alone.tokens == TOKENS
        assert plain.cloud_ms > 0
        report = summarize(rows, (2,), 100.0, {}, exact=True)
        ratio = report["cloud_only_plain"]["cloud_time_ratio"]
        ms = [sum(runs_of(row)[way].cloud_ms for row in rows) for way in (PLAIN, CLOUD)]
        assert ratio == pytest.approx(ms[0] / ms[1], abs=1e-3)
        assert any(line[0] == "cloud only, without --batch-invariant" for line in cells(report)[1])

    def test_its_text_is_not_that_of_the_others(self) -> None:
        """A near-tie that falls the other way there is no difference of theirs."""
        row = made({CLOUD: 100, PLAIN: 100, "2": 50})
        row["runs"][PLAIN]["digest"] = "another"
        assert summarize([row], (2,), 100.0, {}, exact=True)["different"] == []

    def test_nobody_takes_part_where_it_is_not_used(self, blueprint: Blueprint) -> None:
        sides = open_tiny(blueprint, "context")
        assert sides.plain is None
        (row, *_) = rows_of(sides, Options(Sampling(), TOKENS, (2,)))
        assert PLAIN not in row["runs"]


class TestAutomatic:
    @pytest.mark.parametrize(
        ("sampling", "tree", "rejection", "goal"),
        [
            (Sampling(), True, False, "cloud"),
            (Sampling(), True, False, "speed"),
            (Sampling(0.8, seed=1), False, False, "cloud"),
            (Sampling(0.8, seed=1), True, True, "cloud"),
        ],
        ids=["tree", "for speed", "coupled", "drawn"],
    )
    def test_blocks_that_get_what_they_are_worth(
        self, blueprint: Blueprint, sampling: Sampling, tree: bool, rejection: bool, goal: str
    ) -> None:
        sides = open_tiny(blueprint, "shallow:4+context", accept="rejection" if rejection else "coupled")
        options = Options(sampling, TOKENS, (2,), rejection, tree, auto=True, goal=goal)
        rows = rows_of(sides, options)
        report = summarize(rows, (2,), 100.0, {}, exact=not rejection)
        assert report["automatic"]["identical"] is (None if rejection else True)
        assert report["automatic"]["drafted_per_call"] > 0
        assert any("SPADE auto" in line[0] for line in cells(report)[1])

    def test_what_was_learned_stays_if_it_is_to(self, blueprint: Blueprint) -> None:
        """The second question is the first one again: a warm table knows it."""
        again = (QUESTIONS[0], replace(QUESTIONS[0], id="3"))
        steps = {}
        for warm in (False, True):
            sides = open_tiny(blueprint, "recycling")
            options = Options(Sampling(), TOKENS, (4,), tree=True, warm=warm)
            rows = list(Bench(sides.edge, sides.bare, options, {}).run(again))
            steps[warm] = [runs_of(row)["4"].steps for row in rows]
        assert steps[False][1] == steps[False][0] == steps[True][0]
        assert steps[True][1] < steps[True][0]


class TestBridge:
    @pytest.fixture
    def bridge(self, blueprint: Blueprint, tmp_path: Path) -> Path:
        """Untrained: the middle answers as for the token before."""
        model = AutoModelForCausalLM.from_pretrained(blueprint.checkpoint.folder, local_files_only=True)
        net = BridgeNet(model.model.layers[3], 32)
        net.begin_as_copy()
        path = tmp_path / "bridge.safetensors"
        save_bridge(path, net, torch.arange(0, 300, 3), take_fingerprint(blueprint, Cut(), "tiny"))
        return path

    def test_returned_states_are_counted(self, blueprint: Blueprint, bridge: Path) -> None:
        sides = open_tiny(blueprint, "bridge", bridge=bridge)
        assert 0 < sides.memory_share < 1.5
        rows = rows_of(sides, Options(Sampling(), TOKENS, (1, 4)))
        for row in rows:
            runs = runs_of(row)
            assert runs[BARE].digest == runs["4"].digest == runs[CLOUD].digest
            assert runs[BARE].bytes_states == runs[CLOUD].bytes_states == 0
            # Two bytes for each of 32 numbers, for every token that became certain but the last one.
            assert runs["4"].bytes_states == pytest.approx(2 * 32 * TOKENS, abs=2 * 32 * 4)
            assert runs["4"].bytes_down - runs["4"].bytes_states < runs[BARE].bytes_down + 200
        report = summarize(rows, (1, 4), 100.0, {}, exact=True)
        assert report["no_states"]["bytes_states_per_token"] == 0
        assert report["sweep"][1]["bytes_states_per_token"] > 40


def made(way_steps: dict[str, int], tokens: int = 100, **more: Any) -> dict[str, Any]:
    """A row with round figures."""
    runs = {
        way: vars(
            Run(
                tokens,
                steps,
                drafted=4 * steps,
                accepted=tokens - steps,
                rejected=5,
                cloud_ms=10.0 * steps,
                edge_ms=2.0 * steps,
                compute_ms=15.0 * steps,
                bytes_up=1000,
                bytes_down=250,
                digest="same",
                text="the cat",
            )
        )
        for way, steps in way_steps.items()
    }
    return {"id": "7", "task": "summarization", "scored": True, "prompt": {"tokens": 9}, "runs": runs} | more


class TestReport:
    def test_figures_by_hand(self) -> None:
        report = summarize([made({CLOUD: 100, "4": 25})], (4,), 10.0, {}, exact=True)
        alone, found = report[CLOUD], report["spade"]
        assert alone["cloud_calls_per_answer"] == 100
        assert alone["tok_s"]["0"] == pytest.approx(100 / (1.0 + 400 * 8 / 1e7), rel=1e-3)
        assert alone["tok_s"]["150"] == pytest.approx(100 / (1.15 + 400 * 8 / 1e7), rel=1e-3)
        assert found["d"] == 4
        assert found["cloud_calls_per_answer"] == 25
        assert found["call_reduction"] == 0.75
        assert found["cloud_time_ratio"] == 0.25
        assert found["tokens_per_call"] == 4
        assert found["acceptance"] == 0.75
        assert found["acceptance_per_token"] == pytest.approx(75 / 80, abs=1e-4)
        assert found["tok_s"]["80"] == pytest.approx(100 / (0.375 + 25 * 0.08 + 1250 * 8 / 1e7), rel=1e-3)
        assert found["break_even_rtt_ms"] == pytest.approx((1000 - 375) / 25)
        assert found["edge_ms_per_draft"] == 0.5
        assert found["identical"] is True

    def test_baselines_by_hand(self) -> None:
        ways = {CLOUD: 100, "4": 25, COLOCATED.format(4): 25}
        ways |= {name.format(rtt): 50 if name == ONE else 40 for name in (ONE, AHEAD) for rtt in RTTS_MS}
        row = made(ways)
        for rtt in RTTS_MS:
            row["runs"][ONE.format(rtt)]["wall_ms"] = 1000.0
            row["runs"][AHEAD.format(rtt)] |= {"wall_ms": 500.0, "ahead": 12, "stale": 8}
        report = summarize([row], (4,), 10.0, {}, exact=True)
        (beside,) = report["colocated"]
        assert beside["cloud_time_ratio"] == pytest.approx(0.3)  # ten for a pass and two for drafting
        assert beside["draft_ms_per_answer"] == 50
        assert beside["call_reduction"] == 0.75
        assert beside["tok_s"]["80"] == pytest.approx(100 / (0.375 + 0.08 + 400 * 8 / 1e7), rel=1e-3)
        far = report["pipelined"][-1]
        assert far["rtt_ms"] == 150
        assert far["one_at_a_time"] == {"tok_s": 100, "cloud_calls_per_answer": 50, "cloud_time_ratio": 0.5}
        assert far["pipelined"]["tok_s"] == 200
        assert far["pipelined"]["cloud_calls_per_answer"] == 48
        assert (far["pipelined"]["kept_per_answer"], far["pipelined"]["stale_per_answer"]) == (12, 8)
        assert far["identical"] is True
        row["runs"][AHEAD.format(150)]["digest"] = "other"
        report = summarize([row], (4,), 10.0, {}, exact=True)
        assert report["pipelined"][-1]["identical"] is False
        assert report["different"] == ["7"]

    def test_a_different_answer_is_named(self) -> None:
        row = made({CLOUD: 100, "4": 25})
        row["runs"]["4"]["digest"] = "other"
        report = summarize([row], (4,), 10.0, {}, exact=True)
        assert report["different"] == ["7"]
        assert report["spade"]["identical"] is False

    def test_fewest_calls_are_best(self) -> None:
        report = summarize([made({CLOUD: 100, "2": 40, "4": 25, "8": 25})], (2, 4, 8), 10.0, {}, exact=True)
        assert report["spade"]["d"] == 4
        assert report["cheapest_d"] == 4

    def test_nothing_to_compare(self) -> None:
        with pytest.raises(UserError, match="nothing to compare"):
            summarize([], (4,), 10.0, {}, exact=True)

    @needs_scores
    def test_equal_texts_have_equal_scores(self) -> None:
        report = summarize([made({CLOUD: 100, "4": 25})], (4,), 10.0, {"7": "the cat sat"}, exact=True)
        for name in ("bleu1", "bleu4", "rouge1", "rougeL"):
            assert report["spade"][name] == report[CLOUD][name]
        assert report["spade"]["rouge1"] == pytest.approx(80)

    def test_the_papers_figures_stand_beside(self) -> None:
        heads, rows = cells(
            summarize([made({CLOUD: 100, "4": 25, COLOCATED.format(4): 25})], (4,), 10.0, {}, exact=True)
        )
        assert all(len(row) == len(heads) for row in rows)
        names = [row[0] for row in rows]
        assert names == [
            "cloud only",
            "SPADE d=4",
            "co-located d=4",
            "paper: target",
            "paper: draft",
            "paper: SPADE",
        ]
        assert rows[-1][1:4] == ["30.16", "77.4 %", "0.23"]
        assert PAPER["models"] == "draft Llama-3.2-1B (RTX 3080), target Llama-3.1-8B (RTX A6000)"

    @needs_matplotlib
    @pytest.mark.parametrize("suffix", ["png", "svg"])
    def test_the_picture(self, tmp_path: Path, suffix: str) -> None:
        ways = {CLOUD: 100, PLAIN: 90, EDGE: 0, "2": 40, "4": 25, COLOCATED.format(4): 25}
        report = summarize([made(ways)], (2, 4), 10.0, {}, exact=True)
        report |= {"model": "/some/folder/tiny", "draft": "bridge", "accept": "greedy"}
        write_plot(report, file := tmp_path / f"sweep.{suffix}")
        if suffix == "png":
            assert file.read_bytes().startswith(b"\x89PNG")
            return
        text = file.read_text(encoding="utf-8")
        assert "<title>tiny verifies what bridge drafts" in text
        assert "/some" not in text


class TestInput:
    def test_lengths(self) -> None:
        assert parse_lengths("4,1,4") == (1, 4)
        assert parse_sweep("4,auto,1") == ((1, 4), True)
        assert parse_sweep("2") == ((2,), False)
        with pytest.raises(UserError, match="block lengths"):
            parse_sweep("auto")
        for text in ("", "0,1", "1,65", "a"):
            with pytest.raises(UserError, match="block lengths"):
                parse_lengths(text)

    def test_references_of_summaries_only(self, tmp_path: Path) -> None:
        file = tmp_path / "questions.jsonl"
        lines = [
            {"question_id": 1, "category": "summarization", "turns": ["a"], "reference": ["one", "two"]},
            {"question_id": 2, "category": "summarization", "turns": ["a"]},
            {"question_id": 3, "category": "rag", "turns": ["a"], "reference": ["three"]},
        ]
        file.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
        assert load_references(file) == {"1": "one"}


class TestCommand:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        file = tmp_path / "questions.jsonl"
        lines = [
            {"question_id": 1, "category": "qa", "turns": ["the cat"]},
            {"question_id": 2, "category": "summarization", "turns": ["the dog"], "reference": ["a dog"]},
        ]
        file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        return file

    def words(self, folder: Path, data: Path, *more: str) -> tuple[str, ...]:
        words = [
            "bench",
            "spade",
            str(folder),
            "--data",
            str(data),
            "--draft",
            "shallow:4",
            "--d",
            "1,3,auto",
        ]
        return (*words, "--max-new-tokens", "12", "--dtype", "float32", "--no-scores", *more)

    def test_json(self, aparte: Command, llama_folder: Path, data: Path, tmp_path: Path) -> None:
        resume = tmp_path / "rows.jsonl"
        words = self.words(llama_folder, data, "--resume", str(resume), "--json")
        report = aparte(*words).json
        assert {"cloud_only", "edge_only", "spade", "sweep", "paper", "edge_memory_share"} <= set(report)
        assert [row["d"] for row in report["sweep"]] == [1, 3]
        assert report["spade"]["identical"] is True
        assert report["automatic"]["identical"] is True
        assert [row["d"] for row in report["colocated"]] == [4]
        assert [row["rtt_ms"] for row in report["pipelined"]] == list(RTTS_MS)
        assert set(report["spade"]["tok_s"]) == {str(rtt) for rtt in RTTS_MS}
        assert len(resume.read_text(encoding="utf-8").splitlines()) == 3
        assert aparte(*words).json == report  # from the file alone

    def test_table(self, aparte: Command, llama_folder: Path, data: Path) -> None:
        result = aparte(*self.words(llama_folder, data))
        assert "SPADE d=3" in result.out
        assert "paper: SPADE" in result.out
        assert "co-located d=4" in result.out
        assert "blocks kept" in result.out
        assert "Identical to the cloud by itself: yes" in result.err

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (("--d", "0"), "block lengths"),
            (("--d", "4", "--draft-for", "speed"), "Add auto to --d"),
            (("--colocated", "4,0"), "--colocated 4,0"),
            (("--shape", "ring"), "shape"),
            (("--shape", "tree", "--temperature", "1"), "Coupled"),
            (("--task", "poems"), "task"),
            (("--draft", "shallow:9"), "does not fit"),
            (("--draft", "bridge"), "bridge"),
        ],
    )
    def test_mistakes(
        self, aparte: Command, llama_folder: Path, data: Path, more: tuple[str, ...], message: str
    ) -> None:
        result = aparte(*self.words(llama_folder, data, *more))
        assert result.code == 2
        assert message in result.err

    def test_batch_invariant_has_the_plain_cloud_beside_it(
        self, aparte: Command, llama_folder: Path, data: Path
    ) -> None:
        words = self.words(llama_folder, data, "--batch-invariant", "--limit", "1")
        report = json.loads(aparte(*words, "--json").out)
        assert report["cloud_only_plain"]["cloud_calls_per_answer"] == 12
        result = aparte(*words)
        assert "cloud only, without" in result.out
        assert "Of the time of the cloud by itself without --batch-invariant, d=" in result.err

    def test_batch_invariant_reaches_both_sides(self, aparte: Command, data: Path, tmp_path: Path) -> None:
        """A family that cannot have it is refused, which it would not be if the option were dropped."""
        folder = save_tiny("gemma2", tmp_path / "gemma2")
        assert aparte(*self.words(folder, data)).code == 0
        result = aparte(*self.words(folder, data, "--batch-invariant"))
        assert result.code == 2
        assert "--batch-invariant does not work" in result.err


class TestEnd:
    def test_inside_a_block(self, blueprint: Blueprint, llama_folder: Path) -> None:
        sides = open_tiny(blueprint, "same", draft_model=Blueprint.open(llama_folder, FLOAT32))
        options = Options(Sampling(), TOKENS, (4,))
        bench = Bench(sides.edge, sides.bare, options, {})
        (row,) = bench.run(QUESTIONS[:1])
        assert runs_of(row)[CLOUD].tokens == TOKENS
        sides.edge.writer.codec.eos = frozenset(range(0, 300, 7))  # somewhere inside
        (row,) = bench.run(QUESTIONS[:1])
        runs = runs_of(row)
        assert runs["4"].digest == runs[CLOUD].digest == runs[EDGE].digest
        assert runs[CLOUD].tokens < TOKENS
