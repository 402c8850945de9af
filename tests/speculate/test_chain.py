"""Chains: what is picked for each way of accepting, that it pays, and that the text is the target's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from aparte.config import Sampling
from aparte.sampling import choose, process
from aparte.speculate.accept import accept
from aparte.speculate.chain import Chain
from aparte.speculate.context import Context
from aparte.speculate.drafter import Outcome
from aparte.speculate.length import (
    FIRST_LENGTH,
    LONGEST,
    ChainTimes,
    LengthPlan,
    best_length,
    expected_tokens,
)
from aparte.speculate.neural import Guess
from aparte.speculate.tree import BELOW_ROOT
from aparte.speculate.voice import MAX_FAILURES, ModelVoice, SourceVoice
from table_model import NO_LOGITS, VOCAB, Table, logits_after, target


def write(
    chain: Chain, sampling: Sampling, count: int, *, rejection: bool = False
) -> tuple[list[int], list[int]]:
    """A text, and how many tokens each step brought."""
    text, steps = [1, 2], []
    while len(text) < 2 + count:
        tree = chain.propose(text, 32)
        choices = target(tree, text, sampling, rejection)
        accepted = accept(tree, choices)
        chain.observe(Outcome(tree, choices, accepted, NO_LOGITS, tuple(text)))
        text += accepted.tokens
        steps.append(len(accepted.tokens))
    return text[2 : 2 + count], steps


def plain(sampling: Sampling, count: int) -> list[int]:
    """What the target writes alone."""
    text = [1, 2]
    while len(text) < 2 + count:
        text += choose(logits_after(text)[None], [len(text)], sampling)
    return text[2:]


SAMPLED = Sampling(temperature=0.9, seed=3)


class TestPicks:
    @pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(1.3, top_p=0.8, seed=8)])
    @pytest.mark.parametrize("closeness", [1.0, 0.7, 0.0])
    def test_the_text_is_the_targets_own(self, sampling: Sampling, closeness: float) -> None:
        chain = Chain([ModelVoice("table", Table(closeness, top=4))], sampling, length=4)
        assert write(chain, sampling, 60)[0] == plain(sampling, 60)

    def test_a_perfect_draft_is_accepted_whole(self) -> None:
        for sampling in (Sampling(), SAMPLED):
            chain = Chain([ModelVoice("table", Table())], sampling, length=4)
            assert set(write(chain, sampling, 50)[1]) == {5}
        chain = Chain([ModelVoice("table", Table())], SAMPLED, rejection=True, length=4)
        assert set(write(chain, SAMPLED, 50, rejection=True)[1]) == {5}

    def test_shared_noise_agrees_more_often_than_the_likeliest_token(self) -> None:
        """Both sides with the same noise, against a draft that always names its best."""

        class Likeliest(Chain):
            def __init__(self, model: Table) -> None:
                super().__init__([ModelVoice("table", model)], Sampling(), length=4)

        hot = Sampling(temperature=1.2, seed=5)
        coupled = write(Chain([ModelVoice("table", Table(0.9))], hot, length=4), hot, 300)[1]
        likeliest = write(Likeliest(Table(0.9)), hot, 300)[1]
        assert len(coupled) < 0.8 * len(likeliest)

    def test_what_is_drawn_goes_along(self) -> None:
        chain = Chain([ModelVoice("table", Table(0.5))], SAMPLED, rejection=True, length=3, width=4)
        tree = chain.propose([1, 2], 32)
        assert len(tree.drawn) == len(tree) == 3
        for q, token in zip(tree.drawn, tree.tokens, strict=True):
            assert len(q) == 4
            assert token in q.tokens
        assert Chain([ModelVoice("table", Table())], SAMPLED, length=3).propose([1, 2], 32).drawn == ()
        greedy = Chain([ModelVoice("table", Table())], Sampling(), rejection=True, length=3)
        assert greedy.propose([1, 2], 32).drawn == ()

    def test_a_source_names_and_is_said_to(self) -> None:
        chain = Chain([SourceVoice(Context())], SAMPLED, rejection=True, length=3)
        tree = chain.propose([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 32)
        assert tree.tokens == (3, 4, 1)
        assert [q.tokens for q in tree.drawn] == [(3,), (4,), (1,)]

    def test_nothing_after_the_end(self) -> None:
        first = Chain([ModelVoice("table", Table())], Sampling(), length=8).propose([1, 2], 32)
        end = first.tokens[2]
        chain = Chain([ModelVoice("table", Table())], Sampling(), length=8, eos=frozenset({end}))
        assert chain.propose([1, 2], 32).tokens == first.tokens[: first.tokens.index(end) + 1]

    def test_the_budget_is_kept(self) -> None:
        assert len(Chain([ModelVoice("table", Table())], Sampling(), length=8).propose([1, 2], 3)) == 3


class TestRejection:
    """The distribution of whole texts, by the chi-square test of ``test_rejection``."""

    @pytest.mark.parametrize(("length", "closeness"), [(2, 0.4), (None, 0.6)])
    def test_the_text_has_the_targets_distribution(self, length: int | None, closeness: float) -> None:
        """With a fixed length, and with one that is decided token by token."""
        count, texts, found = 2, 1200, Counter[tuple[int, ...]]()
        chance_of = {
            text: math.prod(
                float(process(logits_after((1, 2, *text[:at]))[None], SAMPLED).softmax(-1)[0, token])
                for at, token in enumerate(text)
            )
            for text in itertools.product(range(VOCAB), repeat=count)
        }
        plan = LengthPlan()
        plan.verified(2, 10.0)
        for seed in range(texts):
            sampling = Sampling(temperature=0.9, seed=seed)
            voice = ModelVoice("table", Table(closeness, top=4))
            chain = Chain([voice], sampling, rejection=True, length=length, width=4, plan=plan)
            found[tuple(write(chain, sampling, count, rejection=True)[0])] += 1
        cells = [(found[text], texts * chance) for text, chance in chance_of.items() if texts * chance >= 5]
        freedom = len(cells) - 1
        assert freedom > 10
        statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
        # The quantile of 1 - 1e-4 by Wilson and Hilferty's approximation.
        assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3

    def test_estimates_do_not_tell_which_token_was_drawn(self) -> None:
        """Or whoever cuts by them would bias the text."""
        seen: dict[tuple[int, ...], set[float]] = {}
        for seed in range(60):
            sampling = Sampling(temperature=1.5, seed=seed)
            chain = Chain([ModelVoice("table", Table(0.5))], sampling, rejection=True, length=2)
            tree = chain.propose([1, 2], 32)
            seen.setdefault((), set()).add(tree.probabilities[0])
            seen.setdefault(tree.tokens[:1], set()).add(tree.probabilities[1])
        assert len(seen) > 3
        assert all(len(values) == 1 for values in seen.values())


class TestVoices:
    def test_models_rest_while_a_source_is_sure(self) -> None:
        """And catch up when they are asked again."""
        chain = Chain([ModelVoice("table", table := Table()), SourceVoice(Context())], Sampling(), length=4)
        text = [1, 2]
        for _ in range(40):
            text += choose(logits_after(text)[None], [len(text)], Sampling())
        while len(text) < 300:
            tree = chain.propose(text, 32)
            choices = target(tree, text, Sampling(), False)
            accepted = accept(tree, choices)
            chain.observe(Outcome(tree, choices, accepted, NO_LOGITS, tuple(text)))
            assert (
                len(accepted.path) == 4
            )  # greedy text of such a table repeats itself; both are always right
            text += accepted.tokens
        assert table.passes < 60

    def test_a_model_that_fails_costs_nothing_but_its_guesses(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Table):
            calls = 0

            def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
                Broken.calls += 1
                raise RuntimeError("no text in here")

        chain = Chain([ModelVoice("broken", Broken())], Sampling(), length=4)
        assert write(chain, Sampling(), 20)[0] == plain(Sampling(), 20)
        assert Broken.calls == MAX_FAILURES
        assert "no text" not in caplog.text

    def test_nonsense_is_left_out(self) -> None:
        class Odd(Table):
            def begin(self, context: Sequence[int]) -> Guess | None:
                super().begin(context)
                return Guess((3, 3, -1, True, 4, 2), (0.5, 0.4, 0.3, 0.2, float("nan"), 0.1))  # type: ignore[arg-type]

        voice = ModelVoice("odd", Odd())
        voice.begin([1, 2])
        assert [(c.token, c.prior) for c in voice.candidates()] == [(3, 0.5), (2, 0.1)]

    def test_a_model_that_cannot_start(self) -> None:
        class Absent(Table):
            def begin(self, context: Sequence[int]) -> Guess | None:
                return None

        chain = Chain([ModelVoice("absent", Absent())], Sampling(), length=4)
        assert len(chain.propose([1, 2], 32)) == 0


class TestPipelining:
    def test_proposals_that_run_ahead_are_judged_in_order(self) -> None:
        chain = Chain([ModelVoice("table", Table())], Sampling(), length=2)
        text = [1, 2]
        first = chain.propose(text, 32)
        ahead = chain.propose([*text, *first.tokens], 32)
        choices = target(first, text, Sampling(), False)
        accepted = accept(first, choices)
        chain.observe(Outcome(first, choices, accepted, NO_LOGITS, tuple(text)))
        assert accepted.tokens[-1] == ahead.tokens[0]
        context = [*text, *first.tokens]
        choices = target(ahead, context, Sampling(), False)
        chain.observe(Outcome(ahead, choices, accept(ahead, choices), NO_LOGITS, tuple(context), known=1))
        assert chain.plan.chance > 0.7
        assert chain.plan.times is None  # times of steps that overlap say nothing


class TestLength:
    def test_the_closed_form_is_the_sum(self) -> None:
        for chance in (0.0, 0.3, 0.9, 1.0):
            for length in (0, 1, 5):
                total = sum(chance**depth for depth in range(length + 1))
                assert expected_tokens(chance, length) == pytest.approx(total)

    def test_far_links_and_good_drafts_want_longer_chains(self) -> None:
        far, near = ChainTimes(150, 2, 10), ChainTimes(12, 2, 10)
        assert best_length(0.8, far) > best_length(0.8, near)
        assert best_length(0.9, far) > best_length(0.5, far)
        assert best_length(0.3, ChainTimes(1, 1, 10)) == 0
        assert best_length(1.0, far) == LONGEST

    @pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.9])
    @pytest.mark.parametrize("rtt_ms", [0.0, 20.0, 80.0, 150.0])
    def test_deciding_token_by_token_ends_there_too(self, chance: float, rtt_ms: float) -> None:
        plan = LengthPlan()
        for _ in range(200):
            for drafts in (2, 6):
                plan.verified(drafts, rtt_ms + 20 + 2 * (1 + drafts))
                plan.drafted(drafts, 10.0 * drafts)
        for number in range(2000):
            plan.judged(number % 10 < 10 * chance)
        times = plan.times
        assert times is not None
        assert times.round_ms == pytest.approx(rtt_ms + 22, rel=0.05, abs=2)
        assert times.edge_ms == pytest.approx(10)
        length, reached, tokens = 0, 1.0, 1.0
        while plan.goes_on(length, reached, tokens):
            length, reached = length + 1, reached * plan.chance
            tokens += reached
        assert length == best_length(plan.chance, times)

    def test_before_anything_is_known(self) -> None:
        chain = Chain([ModelVoice("table", Table())], Sampling())
        assert len(chain.propose([1, 2], 32)) == FIRST_LENGTH

    @pytest.mark.parametrize(("rtt_s", "least", "most"), [(0.0, 0, 2), (1.0, 10, LONGEST)])
    def test_it_learns_from_the_clock(self, rtt_s: float, least: int, most: int) -> None:
        class Clock:
            now = 0.0

            def __call__(self) -> float:
                return self.now

        class Slow(Table):
            def _guess(self, path: tuple[int, ...]) -> Guess:
                clock.now += 0.02
                return super()._guess(path)

        clock = Clock()
        chain, text = Chain([ModelVoice("table", Slow())], Sampling(), clock=clock), [1, 2]
        for _ in range(30):
            tree = chain.propose(text, 32)
            clock.now += rtt_s + 0.005
            choices = target(tree, text, Sampling(), False)
            accepted = accept(tree, choices)
            chain.observe(Outcome(tree, choices, accepted, NO_LOGITS, tuple(text)))
            text += accepted.tokens
        assert least <= len(tree) <= most
        assert tree.parents == tuple(range(BELOW_ROOT, len(tree) - 1))

    def test_for_the_clouds_time_neither_the_way_nor_drafting_counts(self) -> None:
        plans = {}
        for spares_cloud in (False, True):
            plan = plans[spares_cloud] = LengthPlan(spares_cloud=spares_cloud)
            for drafts in (2, 6) * 100:
                plan.verified(drafts, 1000.0, 20.0 + 2 * (1 + drafts))
                plan.drafted(drafts, 10.0 * drafts)
        assert plans[True].edge_ms == 0
        times = plans[True].times
        assert times is not None
        assert 20 < times.round_ms < 30
        assert 1 < times.node_ms < 3
        assert plans[False].edge_ms == pytest.approx(10)

    def test_the_loop_tells_what_the_cloud_took(self) -> None:
        plan = LengthPlan(spares_cloud=True)
        chain = Chain([ModelVoice("table", Table())], Sampling(), length=2, plan=plan)
        tree = chain.propose([1, 2], 32)
        choices = target(tree, [1, 2], Sampling(), False)
        outcome = Outcome(tree, choices, accept(tree, choices), NO_LOGITS, (1, 2), cloud_ms=321.0)
        chain.observe(outcome)
        assert plan.times is not None
        assert plan.times.round_ms == pytest.approx(319, abs=2)
