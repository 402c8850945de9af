"""The automatic node budget against fixed ones: simulated time, replays, regret, and the picture."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aparte.answer import Answer, Writer
from aparte.config import Cut, Sampling, Stopping
from aparte.errors import UserError
from aparte.measure.budget_grid import BUDGETS, FIXED, LINKS, Options, Run, parse_links, run
from aparte.measure.budget_plot import write_plot
from aparte.measure.budget_report import cells, regret, summarize
from aparte.measure.plot_file import check_plot
from aparte.measure.simulated_link import SimulatedLink, link_ms, open_simulated
from aparte.measure.specbench import TASKS, Question
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.speculate.neural import Guess
from aparte.speculate.settings import Decoding
from cli.command import Command
from running import FLOAT32

pytestmark = pytest.mark.slow

PROMPT = tuple(range(20, 50))
FAR, NEAR = WanProfile(rtt_ms=80, mbps=100), WanProfile(rtt_ms=5, mbps=20)
QUESTIONS = (
    Question("1", "qa", ("the cat and the dog",)),
    Question("2", "rag", ("the cat the cat the cat", "and then")),
)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib (extra: plots) is not installed"
)


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def simulated(llama_folder: Path, clock: Clock) -> Iterator[tuple[Writer, SimulatedLink]]:
    """A tiny model that computes in no time, behind a simulated link; it never ends an answer by itself."""
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    writer, link = open_simulated(blueprint, "tiny", Cut(), wire="float32", clock=clock)
    writer.codec.eos = frozenset()
    yield writer, link
    writer.target.close()


def write(writer: Writer, decoding: Decoding, count: int = 24, **drafter: Any) -> Answer:
    writer.forget()
    answer, pieces = writer.write(
        PROMPT,
        make_drafter(decoding, **drafter),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(max_new_tokens=count),
    )
    for _ in pieces:
        pass
    return answer


class TestSimulatedLink:
    def test_steps_take_their_round_trip_and_their_bytes(
        self, simulated: tuple[Writer, SimulatedLink]
    ) -> None:
        writer, link = simulated
        link.profile = FAR
        answer = write(writer, Decoding(max_nodes=8, in_flight=1))
        for step in answer.steps:
            size = step.timing.bytes_up + step.timing.bytes_down
            assert size > 2 * 4 * 32 * step.nodes
            assert step.step_ms == pytest.approx(80 + size * 8 / 100e3, abs=1e-6)
            assert step.timing.wait_ms == pytest.approx(step.step_ms, abs=1e-6)
        assert answer.elapsed_s * 1e3 == pytest.approx(sum(step.step_ms for step in answer.steps))
        assert answer.bytes_up + answer.bytes_down == sum(
            step.timing.bytes_up + step.timing.bytes_down for step in answer.steps
        )

    def test_computing_comes_on_top(self, simulated: tuple[Writer, SimulatedLink], clock: Clock) -> None:
        writer, link = simulated
        link.profile = WanProfile(rtt_ms=20)
        front = writer.target.parts.front  # type: ignore[attr-defined]
        forward = front.forward

        def slow(*arguments: Any) -> Any:
            clock.now += 0.003
            return forward(*arguments)

        front.forward = slow
        answer = write(writer, Decoding("sequential"))
        assert [step.step_ms for step in answer.steps] == pytest.approx([23.0] * 24)
        assert [step.timing.device_ms for step in answer.steps] == pytest.approx([3.0] * 24)

    def test_the_budget_learns_what_the_link_costs(self, simulated: tuple[Writer, SimulatedLink]) -> None:
        writer, link = simulated
        link.profile = FAR
        write(writer, Decoding(in_flight=1))
        assert 75 < writer.budget.expect_ms(1) < 85

    def test_a_model_drafts_as_far_as_the_link_makes_worth_while(
        self, simulated: tuple[Writer, SimulatedLink], clock: Clock
    ) -> None:
        writer, link = simulated
        text = write(writer, Decoding("sequential"), count=120).token_ids
        begun = {}
        for rtt_ms in (5, 5000):
            link.profile = WanProfile(rtt_ms=rtt_ms)
            model = Oracle(text, clock, pass_ms=40)
            decoding = Decoding("model", draft="tiny", max_nodes=1, in_flight=1)
            answer = write(writer, decoding, count=100, models={"model": model}, clock=link.clock)
            assert answer.token_ids == text[:100]
            begun[rtt_ms] = model.begun / len(answer.steps)
        assert begun[5000] == 1
        assert begun[5] < 0.5


class Oracle:
    """A draft model that knows the text, and takes its time."""

    def __init__(self, text: Sequence[int], clock: Clock, pass_ms: float) -> None:
        self._text = text
        self._clock = clock
        self._pass_s = pass_ms / 1e3
        self._depths: list[int] = []
        self.begun = 0

    def begin(self, context: Sequence[int]) -> Guess | None:
        self.begun += 1
        self._at, self._depths = len(context) - len(PROMPT), []
        return self._guess(0)

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        depths = [1 + (self._depths[parent] if parent >= 0 else 0) for parent in parents]
        self._depths += depths
        return [self._guess(depth) for depth in depths]

    def _guess(self, depth: int) -> Guess:
        self._clock.now += self._pass_s
        return Guess((self._text[min(self._at + depth, len(self._text) - 1)],), (0.9,))


class Parrot:
    """A draft model that says the last token again."""

    def begin(self, context: Sequence[int]) -> Guess | None:
        return Guess((context[-1],), (0.5,))

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        return [Guess((token,), (0.5,)) for token in tokens]


class TestRun:
    def test_links_are_read(self) -> None:
        assert parse_links("80x100,5x20,80x100") == (FAR, NEAR)
        assert len(parse_links(None)) == len(LINKS) == 12
        for text in ("", "80", "80x", "80x100x5", "far"):
            with pytest.raises(UserError, match="80x100"):
                parse_links(text)

    @pytest.mark.parametrize("neural", [False, True])
    def test_the_text_is_the_same_under_all_budgets(
        self, simulated: tuple[Writer, SimulatedLink], neural: bool
    ) -> None:
        writer, link = simulated
        options = Options(Sampling(), 16, {"bridge": Parrot()} if neural else {})
        assert options.replayed == (("0",) if neural else FIXED)
        rows = list(run(writer, link, QUESTIONS, (FAR, NEAR), options))
        assert [(row["id"], row["rtt_ms"]) for row in rows] == [("1", 80), ("1", 5), ("2", 80), ("2", 5)]
        assert all(row["identical"] for row in rows)
        assert len({row["runs"][budget]["digest"] for row in rows for budget in BUDGETS}) == 2
        for row in rows:
            assert list(row["runs"]) == list(BUDGETS)
            assert row["runs"]["0"]["drafted"] == 0
            assert row["runs"]["0"]["steps"] == row["runs"]["0"]["tokens"] == 16
            for budget in BUDGETS[1:]:
                most = 32 if budget == "automatic" else int(budget)
                assert row["runs"][budget]["drafted"] <= most * row["runs"][budget]["steps"]

    def test_what_computes_in_no_time_takes_the_links(self, simulated: tuple[Writer, SimulatedLink]) -> None:
        writer, link = simulated
        for row in run(writer, link, QUESTIONS, (FAR, NEAR), Options(Sampling(), 16)):
            profile = FAR if row["rtt_ms"] == 80 else NEAR
            for budget in BUDGETS:
                one = Run(**row["runs"][budget])
                assert one.compute_ms == pytest.approx(0, abs=1e-6)
                assert one.timed_ms(profile) == pytest.approx(
                    one.timed_steps * profile.rtt_ms + one.timed_bytes * 8 / (profile.mbps or 1) / 1e3
                )

    def test_what_does_not_depend_on_the_link_is_measured_once(
        self, simulated: tuple[Writer, SimulatedLink], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer, link = simulated
        written = 0
        original = Writer.write

        def counted(self: Writer, *arguments: Any, **settings: Any) -> Any:
            nonlocal written
            written += 1
            return original(self, *arguments, **settings)

        monkeypatch.setattr(Writer, "write", counted)
        list(run(writer, link, QUESTIONS, (FAR, NEAR), Options(Sampling(), 8)))
        # One to read the prompt, every fixed one, automatic on both links.
        assert written == len(QUESTIONS) * (1 + len(FIXED) + 2)
        written = 0
        list(run(writer, link, QUESTIONS, (FAR, NEAR), Options(Sampling(), 8, {"bridge": Parrot()})))
        assert written == len(QUESTIONS) * (2 + 2 * len(BUDGETS[1:]))

    def test_each_link_has_a_budget_of_its_own(self, simulated: tuple[Writer, SimulatedLink]) -> None:
        writer, link = simulated
        seen: dict[float, set[int]] = {}
        for row in run(writer, link, QUESTIONS, (FAR, NEAR), Options(Sampling(), 16)):
            seen.setdefault(row["rtt_ms"], set()).add(id(writer.budget))
            assert (writer.budget.expect_ms(1) > 40) == (row["rtt_ms"] == 80)
        assert [len(budgets) for budgets in seen.values()] == [1, 1]


def a_run(ms: float, **changes: Any) -> dict[str, Any]:
    """100 tokens in 50 steps with 400 drafted nodes; all but one step timed, ``ms`` of compute."""
    figures = {"tokens": 100, "steps": 50, "drafted": 400, "timed_tokens": 98, "timed_steps": 49}
    return {**figures, "timed_bytes": 0, "compute_ms": ms, "digest": "a", **changes}


def a_row(task: str = "qa", identical: bool = True, **compute_ms: float) -> dict[str, Any]:
    """A row at 80 ms whose budgets, ``b0`` to ``b64`` and ``automatic``, computed for so long."""
    runs = {budget: a_run(compute_ms.get(f"b{budget}", 6080)) for budget in FIXED}
    runs["automatic"] = a_run(compute_ms.get("automatic", 6080))
    return {"id": task, "task": task, "rtt_ms": 80, "mbps": 100, "identical": identical, "runs": runs}


class TestReport:
    def test_regret(self) -> None:
        assert regret(95, 100) == pytest.approx(0.05)
        assert regret(110, 100) == pytest.approx(-0.1)

    def test_speed_is_timed_tokens_over_compute_and_link(self) -> None:
        # 49 steps of 80 ms are 3920 ms of link.
        report = summarize([a_row(b8=880, automatic=980, b0=5880)], [FAR])
        (row,) = report["rows"]
        assert row["budgets"]["8"] == round(98 / 4.8, 3)
        assert row["budgets"]["0"] == 10.0
        assert row["automatic"] == 20.0
        assert row["best"] == 8
        assert row["regret"] == round(1 - 4.8 / 4.9, 4) == report["worst_regret"]
        assert row["automatic_nodes"] == 8.0
        assert (row["rtt_ms"], row["mbps"]) == (80, 100)

    def test_bytes_cost_their_bandwidth(self) -> None:
        one = Run(**a_run(100, timed_bytes=125_000))
        assert one.timed_ms(FAR) == 100 + 49 * 80 + 10
        assert link_ms(WanProfile(rtt_ms=5), 2, 10**9) == 10

    def test_questions_are_pooled_and_resampled(self) -> None:
        report = summarize([a_row("qa", automatic=980), a_row("rag", automatic=5980)], [FAR])
        (row,) = report["rows"]
        assert row["automatic"] == round(2 * 98 / (4.9 + 9.9), 3)
        assert row["regret_low"] < row["regret"] < row["regret_high"]
        assert report["questions"] == 2

    def test_figures_by_task_and_macro_average(self) -> None:
        report = summarize([a_row("qa", b4=980), a_row("rag", b4=5880)], [FAR, FAR])
        assert report["categories"]["qa"]["4"] == {"mat": 2.0, "tok_s": 20.0, "nodes_per_step": 8.0}
        assert report["macro"]["4"] == {"mat": 2.0, "tok_s": 15.0, "nodes_per_step": 8.0}
        assert set(report["categories"]["rag"]) == set(BUDGETS)
        assert report["categories_link"] == {"rtt_ms": 80, "mbps": 100}

    def test_differences_are_told(self) -> None:
        report = summarize([a_row("qa"), a_row("rag", identical=False)], [FAR])
        assert report["identical"] is False
        assert report["different"] == ["rag"]

    def test_nothing_timed_is_an_error(self) -> None:
        row = a_row()
        row["runs"]["64"] |= {"timed_tokens": 0, "timed_steps": 0, "compute_ms": 0.0}
        with pytest.raises(UserError, match="--max-new-tokens"):
            summarize([row], [FAR])

    def test_the_table_is_complete(self) -> None:
        heads, rows = cells(summarize([a_row(b8=880, automatic=980)], [FAR]))
        assert all(len(heads) == len(row) for row in rows)
        assert rows[0][-2] == "2.0 %"


@pytest.fixture
def report() -> dict[str, Any]:
    return summarize([a_row(task) for task in TASKS], [FAR])


class TestPlot:
    @needs_matplotlib
    def test_svg_stands_alone(self, report: dict[str, Any], tmp_path: Path) -> None:
        write_plot(report, tmp_path / "plot.svg")
        text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
        assert "<title>Node budgets by task: 80 ms round trip, 100 Mbit/s (link simulated)" in text
        assert '<rect x="1" y="1"' in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        ids = set(re.findall(r'id="([^"]+)"', text))
        assert set(re.findall(r'href="#([^"]+)"', text)) <= ids
        write_plot(report, tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text

    @needs_matplotlib
    def test_png(self, report: dict[str, Any], tmp_path: Path) -> None:
        write_plot(report, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("name", ["plot.pdf", "plot", "missing/plot.svg"])
    def test_what_cannot_be_written_is_said_beforehand(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="--plot"):
            check_plot(tmp_path / name)

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(UserError, match=r"aparte\[plots\]"):
            check_plot(tmp_path / "plot.svg")


class TestCommand:
    @pytest.fixture
    def base(self, llama_folder: Path, tmp_path: Path) -> tuple[object, ...]:
        file = tmp_path / "questions.jsonl"
        rows = [
            {"question_id": str(number), "category": category, "turns": ["the cat " * (3 + number)]}
            for number, category in enumerate(("qa", "rag", "coding"))
        ]
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
        options = ("--data", file, "--max-new-tokens", 12, "--links", "80x100,5x20")
        return ("bench", "budget", llama_folder, *options, "--dtype", "float32", "--wire", "float32")

    def test_a_run_reports_and_resumes(
        self, aparte: Command, base: tuple[object, ...], tmp_path: Path
    ) -> None:
        finished = tmp_path / "rows.jsonl"
        first = aparte(*base, "--resume", finished, "--json")
        assert first.code == 0, first.err
        data = first.json
        assert [(row["rtt_ms"], row["mbps"]) for row in data["rows"]] == [(80, 100), (5, 20)]
        for row in data["rows"]:
            assert set(row["budgets"]) == set(FIXED)
            assert row["automatic"] > 0
            assert str(row["best"]) in FIXED
            assert row["regret"] == pytest.approx(
                1 - row["automatic"] / row["budgets"][str(row["best"])], abs=1e-3
            )
        assert data["identical"] is True
        assert "simulated" in data["link_simulated"]
        assert set(data["categories"]) == {"qa", "rag", "multi-turn"}
        lines = finished.read_text().splitlines()
        assert len(lines) == 1 + 6
        # A finished run measures nothing again, an interrupted one the rest.
        assert aparte(*base, "--resume", finished, "--json").json == data
        finished.write_text("\n".join(lines[:4]) + "\n")
        assert aparte(*base, "--resume", finished, "--json").json["questions"] == 3
        assert finished.read_text().splitlines()[:4] == lines[:4]
        assert len(finished.read_text().splitlines()) == 7
        other = aparte(*base, "--resume", finished, "--limit", 2)
        assert other.code == 2
        assert "other settings" in other.err

    @needs_matplotlib
    def test_people_get_a_table_and_a_plot(
        self, aparte: Command, base: tuple[object, ...], tmp_path: Path
    ) -> None:
        result = aparte(*base, "--limit", 1, "--plot", tmp_path / "plot.svg")
        assert result.code == 0, result.err
        assert "regret" in result.out
        assert "Link simulated" in result.err
        assert "Same text under all budgets: yes" in result.err
        assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
