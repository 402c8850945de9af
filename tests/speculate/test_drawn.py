"""Drawn trees: what they are made of, that siblings pay, and that the text has the target's distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from aparte.config import Sampling
from aparte.distribution import UNDECIDED, Distribution
from aparte.rejection import Noise, draw_in_tree, judge
from aparte.sampling import process
from aparte.speculate.accept import accept
from aparte.speculate.calibration import Calibration
from aparte.speculate.chain import Chain
from aparte.speculate.context import Context
from aparte.speculate.drafter import Drafter, Outcome
from aparte.speculate.drawn import DrawnTree, open_drawn_tree
from aparte.speculate.length import FIRST_LENGTH, LengthPlan
from aparte.speculate.neural import Guess
from aparte.speculate.source import Source
from aparte.speculate.tree import BELOW_ROOT, DraftTree
from aparte.speculate.voice import MAX_FAILURES, ModelVoice
from table_model import NO_LOGITS, VOCAB, Table, logits_after

#: After it a source that looks for repetitions has something to name: 3 again, or 4.
PROMPT = (1, 2, 3, 4, 1, 2)
COUNT, TEXTS = 2, 500
Judge = Callable[..., tuple[int, ...]]


def write(
    drafter: Drafter, sampling: Sampling, count: int, verdict: Judge = judge
) -> tuple[list[int], list[int]]:
    """A text, and how many tokens each step brought."""
    text, steps = list(PROMPT), []
    while len(text) < len(PROMPT) + count:
        tree = drafter.propose(text, 32)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        logits = torch.stack([logits_after((*text, *path)) for path in ((), *paths)])
        p = process(logits, sampling).softmax(-1)
        choices = verdict(tree.parents, tree.tokens, tree.drawn, p, Noise(sampling.seed, len(text)))
        accepted = accept(tree, choices)
        drafter.observe(Outcome(tree, choices, accepted, NO_LOGITS, tuple(text)))
        text += accepted.tokens
        steps.append(len(accepted.tokens))
    return text[len(PROMPT) : len(PROMPT) + count], steps


def chi_square(
    make: Callable[[Sampling], Drafter],
    temperature: float,
    verdict: Judge = judge,
    *,
    count: int = COUNT,
    texts: int = TEXTS,
) -> tuple[float, float]:
    """The statistic of the counts of whole texts, and what it may be, as in ``test_rejection``."""
    usual = Sampling(temperature=temperature)
    found = Counter(
        tuple(write(make(replace(usual, seed=seed)), replace(usual, seed=seed), count, verdict)[0])
        for seed in range(texts)
    )
    expected = {}
    for text in itertools.product(range(VOCAB), repeat=count):
        shares = (
            process(logits_after((*PROMPT, *text[:at]))[None], usual).softmax(-1)[0] for at in range(count)
        )
        expected[text] = texts * math.prod(
            float(share[token]) for share, token in zip(shares, text, strict=True)
        )
    cells = [(found[text], want) for text, want in expected.items() if want >= 5]
    rare = [(found[text], want) for text, want in expected.items() if want < 5]
    if rare:
        cells.append((sum(seen for seen, _ in rare), max(5.0, sum(want for _, want in rare))))
    freedom = len(cells) - 1
    assert freedom >= 5
    # The quantile of 1 - 1e-4 by Wilson and Hilferty's approximation.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((seen - want) ** 2 / want for seen, want in cells), bound


def drawn(closeness: float = 0.5, *, size: int | None = 6, named: bool = False, **more: object):
    """Opens trees over a table, and a source that names tokens if that is wanted."""

    def make(sampling: Sampling) -> DrawnTree:
        sources: list[Source] = [Context()] if named else []
        models = {"table": Table(closeness, top=4)}
        learned = {"calibration": Calibration({}), **more}
        return DrawnTree(sources, models, sampling, size=size, width=4, **learned)  # type: ignore[arg-type]

    return make


class Thin(DrawnTree):
    """Leaves out whatever its draft thinks unlikely, after drawing it."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        likely = [
            dict(zip(q.tokens, q.probabilities, strict=True))[token] > 0.3
            for q, token in zip(tree.drawn, tree.tokens, strict=True)
        ]
        return tree.head(likely.index(False) if False in likely else len(likely))


class TestDistribution:
    @pytest.mark.parametrize(
        ("temperature", "closeness"), [(0.6, 0.6), (1.0, 0.5), (1.7, 0.8), (1.0, 0.0)], ids=str
    )
    def test_the_text_is_the_targets(self, temperature: float, closeness: float) -> None:
        """The last of them is a draft that has nothing to do with the target."""
        statistic, bound = chi_square(drawn(closeness), temperature)
        assert statistic < bound

    def test_with_tokens_that_are_named_and_drawn(self) -> None:
        statistic, bound = chi_square(drawn(0.4, named=True), 1.2)
        assert statistic < bound

    def test_where_it_decides_itself_how_far_to_grow(self) -> None:
        """By what it learned from other texts, all of which it goes on learning from."""
        plan, calibration = LengthPlan(), Calibration()
        plan.verified(2, 50.0)
        plan.verified(6, 54.0)
        statistic, bound = chi_square(drawn(0.5, size=None, plan=plan, calibration=calibration), 1.0)
        assert statistic < bound


class TestWrongVariants:
    """The same test finds them out."""

    def test_siblings_judged_as_if_drawn_with_replacement(self) -> None:
        def careless(
            parents: Sequence[int],
            tokens: Sequence[int],
            drawn: Sequence[Distribution],
            p: torch.Tensor,
            noise: Noise,
        ) -> tuple[int, ...]:
            """``q`` is the same for every sibling."""
            choices = [UNDECIDED] * len(p)
            node, depth = BELOW_ROOT, 0
            while True:
                left, chosen = p[1 + node].clone(), None
                for rank, child in enumerate(place for place, parent in enumerate(parents) if parent == node):
                    q = torch.zeros(VOCAB)
                    q[list(drawn[child].tokens)] = torch.tensor(drawn[child].probabilities)
                    if noise.uniform(depth, rank) * q[tokens[child]] < left[tokens[child]]:
                        chosen = child
                        break
                    left = (left - q).clamp(min=0)
                    left = left / left.sum() if left.sum() > 0 else p[1 + node]
                if chosen is None:
                    choices[1 + node] = int((left.log() + noise.gumbel(depth, VOCAB)).argmax())
                    return tuple(choices)
                choices[1 + node] = tokens[chosen]
                node, depth = chosen, depth + 1

        statistic, bound = chi_square(drawn(0.0), 1.7, careless, texts=800)
        assert statistic > 1.5 * bound

    def test_cutting_by_what_was_drawn(self) -> None:
        def thin(sampling: Sampling) -> DrawnTree:
            table = Table(0.3, top=4)
            return Thin([], {"table": table}, sampling, size=3, width=4, calibration=Calibration({}))

        statistic, bound = chi_square(thin, 1.7, count=1)
        assert statistic > 1.5 * bound


SAMPLED = Sampling(temperature=0.9, seed=3)


class TestTrees:
    def test_siblings_come_from_one_distribution_without_replacement(self) -> None:
        seen = 0
        for seed in range(20):
            tree = drawn(0.3, size=12)(Sampling(1.2, seed=seed)).propose(PROMPT, 32)
            assert len(tree) == len(tree.drawn) == 12
            for parent in set(tree.parents):
                children = [node for node in range(12) if tree.parents[node] == parent]
                assert len({tree.drawn[node] for node in children}) == 1
                tokens = [tree.tokens[node] for node in children]
                assert len(set(tokens)) == len(tokens)
                assert set(tokens) <= set(tree.drawn[children[0]].tokens)
                seen = max(seen, len(tokens))
        assert seen > 1

    def test_places_and_texts_share_no_noise(self) -> None:
        q = Distribution(tuple(range(50)), (0.02,) * 50)
        orders = {
            draw_in_tree(q, seed=seed, position=position, place=place)
            for seed in (0, 1)
            for position in (3, 4)
            for place in range(5)
        }
        assert len(orders) == 20

    def test_a_perfect_draft_is_a_chain_and_accepted_whole(self) -> None:
        tree = DrawnTree([], {"table": Table()}, SAMPLED, size=4, width=VOCAB)
        for _ in range(2):  # until it has learned how good it is
            steps = write(tree, SAMPLED, 120)[1]
        assert set(steps) == {5}

    def test_an_unsure_draft_gains_from_siblings(self) -> None:
        cool = Sampling(temperature=0.8, seed=5)
        tree = write(drawn(0.35, size=6)(cool), cool, 300)[1]
        voice = ModelVoice("table", Table(0.35, top=4))
        chain = write(Chain([voice], cool, rejection=True, length=6, width=4), cool, 300)[1]
        assert len(tree) < 0.9 * len(chain)

    def test_what_sources_name_is_said_to_be_named(self) -> None:
        tree = DrawnTree([Context()], {}, SAMPLED, size=3).propose([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 32)
        assert tree.tokens[0] == 3
        assert all(q == Distribution.only(token) for q, token in zip(tree.drawn, tree.tokens, strict=True))

    def test_estimates_before_a_draw_do_not_tell_what_was_drawn(self) -> None:
        """Whether there is a draw is the same for every seed as long as the tree is."""
        second: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for seed in range(80):
            tree = drawn(0.5, size=6)(Sampling(1.5, seed=seed)).propose(PROMPT, 32)
            for count in range(1, 6):
                second.setdefault((count, *tree.tokens[:count]), set()).add(tree.parents[: count + 1])
        assert all(len(shapes) == 1 for shapes in second.values())
        assert len({shape for shapes in second.values() for shape in shapes}) > 5

    def test_nothing_after_the_end(self) -> None:
        tree = drawn(0.9, size=8)(SAMPLED).propose(PROMPT, 32)
        end = tree.tokens[0]
        again = drawn(0.9, size=8, eos=frozenset({end}))(SAMPLED).propose(PROMPT, 32)
        assert again.tokens[0] == end
        assert all(again.tokens[parent] != end for parent in again.parents if parent != BELOW_ROOT)

    def test_the_budget_is_kept(self) -> None:
        assert len(drawn(size=8)(SAMPLED).propose(PROMPT, 3)) == 3
        assert len(drawn(size=8)(SAMPLED).propose(PROMPT, 0)) == 0

    def test_greedy_text_is_not_drawn(self) -> None:
        with pytest.raises(ValueError, match="greedy"):
            drawn()(Sampling())

    def test_before_anything_is_known(self) -> None:
        assert len(drawn(size=None)(SAMPLED).propose(PROMPT, 32)) == FIRST_LENGTH


class TestPace:
    @pytest.mark.parametrize(("rtt_s", "least", "most"), [(0.0, 0, 2), (2.0, 10, 32)])
    def test_it_learns_from_the_clock(self, rtt_s: float, least: int, most: int) -> None:
        class Clock:
            now = 0.0

            def __call__(self) -> float:
                return self.now

        clock = Clock()

        class Slow(Table):
            def begin(self, context: Sequence[int]) -> Guess | None:
                clock.now += 0.02
                return super().begin(context)

            def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
                clock.now += 0.02
                return super().extend(parents, tokens)

        class Verified(DrawnTree):
            def observe(self, outcome: Outcome) -> None:
                clock.now += rtt_s + 0.005 + 0.002 * len(outcome.tree)
                super().observe(outcome)

        tree = Verified([], {"table": Slow(0.6, top=4)}, SAMPLED, width=4, clock=clock)
        write(tree, SAMPLED, 80)
        assert least <= len(tree.propose(PROMPT, 32)) <= most


class TestModels:
    def test_every_place_is_read_once_and_many_in_a_pass(self) -> None:
        class Counting(Table):
            calls = 0

            def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
                Counting.calls += 1
                return super().extend(parents, tokens)

        table = Counting(0.5, top=4)
        tree = DrawnTree([], {"table": table}, SAMPLED, size=16, width=4).propose(PROMPT, 32)
        assert len(tree) == 16
        assert table.passes <= 17
        assert Counting.calls < 12

    def test_a_model_that_fails_costs_nothing_but_its_guesses(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Table):
            calls = 0

            def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
                Broken.calls += 1
                raise RuntimeError("no text in here")

        tree = DrawnTree([], {"broken": Broken(0.5)}, SAMPLED, size=4)
        assert len(write(tree, SAMPLED, 20)[0]) == 20
        assert Broken.calls == MAX_FAILURES
        assert "no text" not in caplog.text

    def test_a_model_that_cannot_start(self) -> None:
        class Absent(Table):
            def begin(self, context: Sequence[int]) -> Guess | None:
                return None

        assert len(DrawnTree([], {"absent": Absent()}, SAMPLED, size=4).propose(PROMPT, 32)) == 0

    def test_names_are_opened(self) -> None:
        models = {"shallow": Table(0.5, top=4)}
        tree = open_drawn_tree(("shallow", "context", "recycling"), models, SAMPLED, size=5)
        assert len(write(tree, SAMPLED, 30)[0]) == 30

    def test_proposals_that_run_ahead_are_judged_in_order(self) -> None:
        tree = DrawnTree([], {"table": Table()}, SAMPLED, size=2, width=VOCAB)
        first = tree.propose(PROMPT, 32)
        context = (*PROMPT, *first.tokens)
        ahead = tree.propose(context, 32)
        for block, text, known in ((first, PROMPT, 0), (ahead, context, 1)):
            choices = (*block.tokens, 0)
            tree.observe(Outcome(block, choices, accept(block, choices), NO_LOGITS, text, known))
        assert tree.plan.chance > 0.7
        assert tree.plan.times is None  # times of steps that overlap say nothing

    def test_proposals_of_an_answer_that_ended_are_forgotten(self) -> None:
        """Or no time of a step would ever count again."""
        tree = DrawnTree([], {"table": Table()}, SAMPLED, size=2, width=VOCAB)
        tree.propose(PROMPT, 32)
        tree.propose((*PROMPT, 1, 2), 32)  # sent ahead, and never heard of
        for text in ((*PROMPT, *range(5)), (*PROMPT, *range(6))):
            block = tree.propose(text, 32)
            choices = (*block.tokens, 0)
            tree.observe(Outcome(block, choices, accept(block, choices), NO_LOGITS, text))
        assert tree.plan.times is not None
