"""The cost model: it finds the costs that made the runs and predicts links that it has not seen."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from aparte.measure.decomposition import Bandwidth
from aparte.measure.rtt_model import Costs, Fold, Projector, Run, Traffic, cross_validate, errors, fit

RTTS = (5.0, 20.0, 40.0, 80.0, 150.0)
RATES = (20.0, 100.0, 1000.0)
#: Limit on nodes to tokens and nodes per step.
TRAFFIC = {0: (1.0, 0.0), 4: (1.8, 3.8), 16: (2.6, 14.5)}
BASE, COOLING, DRAFTING, NODE = 20.0, 5.0, 1.5, 0.8
ROW = 1152


def made(
    rtt_ms: float, mbps: float | None, limit: int, *, noise: float = 0.0, seed: int = 0, prompt: str = ""
) -> Run:
    """A run of 40 steps as the model says, with relative noise."""
    tokens, nodes = TRAFFIC[limit]
    rounds, size = 40, int(40 * (1 + nodes) * ROW)
    chance = random.Random(f"{rtt_ms} {mbps} {limit} {seed} {prompt}")
    transfer = 0.0 if mbps is None else 2 * size * 8 / (mbps * 1e3)
    fixed = BASE + COOLING * math.log(1 + rtt_ms / 20)
    ms = rounds * (rtt_ms + fixed + (DRAFTING if limit else 0)) + rounds * nodes * NODE + transfer
    ms *= 1 + chance.uniform(-noise, noise)
    bandwidth = Bandwidth(mbps, mbps)
    return Run(
        rtt_ms,
        bandwidth,
        limit,
        round(rounds * tokens),
        rounds,
        round(rounds * nodes),
        size,
        size,
        ms,
        prompt,
    )


def grid(noise: float = 0.0) -> list[Run]:
    return [made(rtt, rate, limit, noise=noise) for rtt in RTTS for rate in RATES for limit in TRAFFIC]


class TestFit:
    def test_it_finds_the_costs_that_made_the_runs(self) -> None:
        costs = fit(grid())
        found = (costs.base_ms, costs.cooling_ms, costs.drafting_ms, costs.node_ms)
        assert found == pytest.approx((BASE, COOLING, DRAFTING, NODE), rel=1e-3)
        assert costs.traffic[16].tokens == pytest.approx(2.6)
        assert costs.traffic[4].bytes_up == pytest.approx(4.8 * ROW, rel=1e-4)

    def test_no_cost_is_negative(self) -> None:
        cheap = [made(20, None, 0), *(made(20, None, limit) for limit in (4, 16))]
        faster = [replace(run, ms=run.ms - 30 * run.nodes / 40) for run in cheap]
        costs = fit(faster)
        assert min(costs.base_ms, costs.cooling_ms, costs.node_ms) >= 0
        for limit, traffic in costs.traffic.items():
            assert costs.drafting_ms * bool(limit) + costs.node_ms * traffic.nodes >= -1e-9

    def test_the_first_nodes_may_cost_less_than_the_later_ones(self) -> None:
        """As on a CPU: 4 nodes cost 2 ms, 16 cost 40. A straight line through nothing misses both."""
        costly = {4: 2.0, 16: 40.0}

        def bent(run: Run) -> Run:
            before = DRAFTING + NODE * run.nodes / run.rounds
            return replace(run, ms=run.ms + run.rounds * (costly[run.limit] - before))

        runs = [bent(run) if run.limit else run for run in grid()]
        costs = fit(runs)
        assert costs.drafting_ms < 0 < costs.node_ms
        assert errors(cross_validate(runs))[1] == pytest.approx(0, abs=1e-6)
        plain, few = (replace(costs, traffic={n: Traffic(1, n, 0, 0)}) for n in (0, 1))
        assert few.step_ms(20, Bandwidth(), 1) == pytest.approx(plain.step_ms(20, Bandwidth(), 0))

    def test_sequential_runs_alone_say_nothing_of_nodes(self) -> None:
        costs = fit([made(rtt, None, 0) for rtt in RTTS])
        assert (costs.base_ms, costs.node_ms) == (pytest.approx(BASE), 0.0)

    def test_on_one_link_nothing_is_said_of_cooling(self) -> None:
        costs = fit([made(80, 100, limit) for limit in TRAFFIC])
        assert costs.cooling_ms == 0
        assert costs.base_ms == pytest.approx(BASE + COOLING * math.log(5), rel=1e-3)

    def test_without_runs_there_is_nothing(self) -> None:
        with pytest.raises(ValueError, match="nothing"):
            fit([])


class TestCrossValidation:
    def test_without_noise_other_links_are_predicted_exactly(self) -> None:
        folds = cross_validate(grid())
        assert len(folds) == 45
        assert errors(folds)[1] == pytest.approx(0, abs=1e-6)

    def test_with_noise_errors_are_of_its_size(self) -> None:
        median, worst = errors(cross_validate(grid(noise=0.03)))
        assert median is not None
        assert worst is not None
        assert 0.005 < median < 0.03
        assert worst < 0.06

    def test_the_byte_term_is_what_slow_links_need(self) -> None:
        """Paper A's model, without it, misses them by far more than the errors it reports."""
        blind = [replace(run, bytes_up=0, bytes_down=0) for run in grid()]
        _, worst = errors(cross_validate(blind))
        assert worst is not None
        assert worst > 0.15

    def test_a_fold_never_sees_its_own_link(self) -> None:
        """One link is slower than the model says: its own folds must miss it by that much."""
        runs = [run for run in grid() if run.link != (80.0, 100.0, 100.0)]
        odd = made(80, 100, 0)
        odd = replace(odd, ms=odd.ms * 1.5)
        fold = next(fold for fold in cross_validate([*runs, odd]) if fold.run == odd)
        assert fold.error == pytest.approx(0.5, abs=1e-6)

    def test_on_one_link_prompts_take_turns(self) -> None:
        runs = [made(80, None, limit, prompt=prompt) for limit in TRAFFIC for prompt in "abc"]
        folds = cross_validate(runs)
        assert len(folds) == 9
        assert errors(folds)[1] == pytest.approx(0, abs=1e-6)
        assert cross_validate(runs[:1]) == []
        assert errors([]) == (None, None)

    def test_errors_are_relative_and_signed(self) -> None:
        fold = Fold(made(80, None, 0), 20.0)
        assert fold.error == pytest.approx(20.0 / fold.run.tok_s - 1)
        assert fold.to_json()["error"] == pytest.approx(fold.error, abs=1e-4)


class TestProjection:
    def test_a_limit_between_two_measured_ones(self) -> None:
        costs = fit(grid())
        between = costs.at(8)
        assert costs.traffic[4].tokens < between.tokens < costs.traffic[16].tokens
        assert costs.traffic[4].nodes < between.nodes < costs.traffic[16].nodes
        for limit in (17, 64):
            with pytest.raises(KeyError):
                costs.at(limit)

    def test_other_links_and_other_cuts(self) -> None:
        costs = Costs(20.0, 2.0, 1.0, 0.0, {0: Traffic(1, 0, 1000, 1000), 10: Traffic(2.5, 10, 11000, 11000)})
        assert costs.tok_s(80, Bandwidth(), 0) == pytest.approx(10.0)
        assert costs.tok_s(80, Bandwidth(8.0, 8.0), 10) == pytest.approx(2500 / (80 + 22 + 10 + 22))
        assert costs.tok_s(80, Bandwidth(), 0, shift_ms=25) == pytest.approx(8.0)

    def test_intervals_hold_what_was_measured_and_grow_with_noise(self) -> None:
        widths = []
        for noise in (0.01, 0.05):
            runs = grid(noise)
            projector = Projector(runs, cross_validate(runs))
            inside = 0
            for seed in range(1, 101):
                run = made(60, 50, 16, noise=noise, seed=seed)
                expected, low, high = projector.project(60, Bandwidth(50, 50), 16)
                assert low <= expected <= high
                inside += low <= run.tok_s <= high
            assert inside >= 80
            widths.append((high - low) / expected)
        assert widths[1] > 2 * widths[0]

    def test_the_same_seed_gives_the_same_interval(self) -> None:
        runs = grid(0.03)
        folds = cross_validate(runs)
        one, two, other = (Projector(runs, folds, seed).project(60, Bandwidth(), 4) for seed in (1, 1, 2))
        assert one == two != other
