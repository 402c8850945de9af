"""Measured runs over emulated links: the same answers everywhere, and a model that predicts their speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aparte.config import Cut
from aparte.errors import CutError, UserError
from aparte.measure.decomposition import Bandwidth
from aparte.measure.link_probe import LinkFigures
from aparte.measure.rtt_model import Run, cross_validate, errors
from aparte.measure.rtt_report import RttReport, parse_cuts, parse_grid
from aparte.measure.rtt_runs import Device, Measured, Place, Plan, Reach, measure, merge
from aparte.measure.simulated_link import open_simulated
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from running import FLOAT32, running_server

PROFILES = tuple(WanProfile(rtt_ms=rtt, mbps=rate) for rtt in (20, 60) for rate in (1, 20))
PROMPTS = [tuple(range(20, 50)), tuple(range(60, 85))]
PLAN = Plan(PROMPTS, (0, 8), max_new_tokens=40, repeats=1)


class Clock:
    """Seconds, of which every look at the clock takes some: what a step takes apart from its link."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 5e-4
        return self.now


@pytest.fixture(scope="module")
def places(llama_folder: Path) -> Iterator[list[Place]]:
    """Real answers over links by arithmetic, so that times are exact on a busy machine too."""
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    found = []
    for profile in PROFILES:
        writer, link = open_simulated(blueprint, "tiny", Cut(), wire="float32", clock=Clock())
        writer.codec.eos = frozenset()
        link.profile = profile
        figures = LinkFigures(profile.rtt_ms, 0.5, profile.mbps, profile.mbps, 1.0)
        found.append(Place(writer, profile, figures))
    yield found
    for place in found:
        place.writer.target.close()


@pytest.fixture(scope="module")
def measured(places: list[Place]) -> Measured:
    return measure(places, PLAN)


def test_a_place_at_the_end_of_a_real_link(llama_folder: Path) -> None:
    device = Device(Blueprint.open(llama_folder, FLOAT32), "tiny", Cut(), Reach(wire="float32"))
    device.codec.eos = frozenset()
    assert device.layer_ms() > 0
    with running_server(llama_folder) as (_, url):
        address = ("127.0.0.1", urlsplit(url).port or 0)
        with WanRelay(("127.0.0.1", 0), address, WanProfile(rtt_ms=20, mbps=2)) as relay:
            place = device.place(f"ws://127.0.0.1:{relay.port}")
            found = measure([place], PLAN)
            place.writer.target.close()
    assert place.rtt_ms == place.figures.rtt_ms >= 20
    assert place.bandwidth.mbps_up == pytest.approx(2, rel=0.3)
    for run in found.runs:
        assert run.ms > run.rounds * 20
    assert found.parts[0].total_ms >= found.parts[0].known_ms * 0.98
    assert found.cloud_ms > 0


def test_every_link_has_every_limit_and_prompt(measured: Measured) -> None:
    found = {(run.rtt_ms, run.bandwidth.mbps_up, run.limit, run.prompt) for run in measured.runs}
    assert found == {
        (profile.rtt_ms, profile.mbps, limit, prompt)
        for profile in PROFILES
        for limit in (0, 8)
        for prompt in "01"
    }


def test_a_link_changes_when_steps_arrive_and_not_what_they_carry(measured: Measured) -> None:
    for limit in (0, 8):
        for prompt in "01":
            same = [run for run in measured.runs if (run.limit, run.prompt) == (limit, prompt)]
            assert len({(run.tokens, run.rounds, run.nodes) for run in same}) == 1
            # Headers hold times, and so differ by some digits.
            assert max(run.bytes_down for run in same) - min(run.bytes_down for run in same) < 500


def test_sequential_steps_bring_one_token_and_drafts_more(measured: Measured) -> None:
    sequential = [run for run in measured.runs if run.limit == 0]
    assert all((run.tokens, run.nodes) == (run.rounds, 0) for run in sequential)
    assert all(run.tokens == 39 for run in sequential), "the first step is left out"
    assert any(run.tokens > run.rounds and run.nodes > 0 for run in measured.runs if run.limit)


def test_unseen_links_are_predicted(measured: Measured) -> None:
    """And without the byte term, which paper A leaves out, slow ones are missed."""
    runs = measured.by_link()
    assert len(runs) == 8
    _, worst = errors(cross_validate(runs))
    blind = [
        replace(run, bandwidth=Bandwidth(None, run.bandwidth.mbps_up), bytes_up=0, bytes_down=0)
        for run in runs
    ]
    _, without = errors(cross_validate(blind))
    assert worst == pytest.approx(0, abs=0.01)
    assert without is not None
    assert without > 0.1


def test_the_report(places: list[Place], measured: Measured) -> None:
    report = RttReport(places, measured, cut=Cut(), layers=6, device_layer_ms=1.5)
    said = report.to_json()
    assert (said["rtt_ms"], said["mbps_up"], said["jitter_ms"]) == (60, 1, 0.5), "the link in the middle"
    assert len(said["folds"]) == 8
    assert 0 <= said["median_error"] <= said["worst_error"]
    assert said["acceptance"]["0"]["mat"] == 1.0
    assert said["base_ms"] > 0
    assert said["cloud_layer_ms"] > 0
    rows = report.projections(parse_grid("20,200x1", "--project"), (Cut(), Cut(3, 2)), (0, 4, 8))
    assert len(rows) == 12
    assert all(row["low"] <= row["tok_s"] <= row["high"] for row in rows)
    near, far = (row for row in rows if row["cut"] == "2,2" and row["max_nodes"] == 0)
    assert near["tok_s"] > 3 * far["tok_s"]
    measured_near = next(run for run in report.runs if run.link[:2] == (20, 1) and run.limit == 0)
    assert near["tok_s"] == pytest.approx(measured_near.tok_s, rel=0.01)
    with pytest.raises(UserError, match="Add 12 to --max-nodes"):
        report.projections(PROFILES, (Cut(),), (12,))


def test_another_cut_moves_layers(places: list[Place], measured: Measured) -> None:
    report = RttReport(places, measured, cut=Cut(), layers=6, device_layer_ms=5.0)
    assert report.shift_ms(Cut(2, 2)) == 0
    assert report.shift_ms(Cut(3, 2)) == pytest.approx(5.0 - report.cloud_layer_ms)


def test_on_one_link_prompts_are_left_out(places: list[Place], measured: Measured) -> None:
    runs = [run for run in measured.runs if run.link == measured.runs[0].link]
    report = RttReport(places[:1], replace(measured, runs=runs), cut=Cut(), layers=6, device_layer_ms=1.0)
    assert {fold.run.prompt for fold in report.folds} == {"0", "1"}


class TestPlan:
    @pytest.mark.parametrize("decode", ["auto", "bridge", "context+model", "sequential"])
    def test_drafts_that_depend_on_the_link_are_refused(self, decode: str) -> None:
        with pytest.raises(UserError, match="decoding mode for measuring a link"):
            Plan(PROMPTS, decode=decode)

    def test_answers_of_one_step_are_no_measurement(self, places: list[Place]) -> None:
        with pytest.raises(UserError, match="larger --max-new-tokens"):
            measure(places[:1], replace(PLAN, max_new_tokens=1))


def test_grids_and_cuts() -> None:
    assert parse_grid("5,80x20", "--emulate") == (WanProfile(5, 0, 20), WanProfile(80, 0, 20))
    assert parse_grid("5", "--emulate") == (WanProfile(5),)
    for text in ("", "ax1", "5x", "5x1x2"):
        with pytest.raises(UserError, match="grid of links"):
            parse_grid(text, "--emulate")
    with pytest.raises(UserError, match="not possible"):
        parse_grid("-1x1", "--emulate")
    assert parse_cuts("2,2;1,3", 6) == (Cut(), Cut(1, 3))
    with pytest.raises(CutError):
        parse_cuts("3,3", 6)


def test_merging_adds_up() -> None:
    run = Run(80, Bandwidth(), 0, 10, 10, 0, 100, 200, 1000.0, "0")
    (both,) = merge([run, replace(run, tokens=5, rounds=5, ms=500.0, prompt="1")], lambda run: run.link)
    assert (both.tokens, both.rounds, both.ms, both.bytes_down, both.prompt) == (15, 15, 1500.0, 400, "")
