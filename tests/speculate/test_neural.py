"""The source behind which a neural model drafts, with models that are rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aparte.config import Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.model.parts import Blueprint
from aparte.speculate.accept import accept
from aparte.speculate.context import Context
from aparte.speculate.drafter import Drafter, Nothing, Outcome
from aparte.speculate.merge import Merged
from aparte.speculate.neural import MAX_FAILURES, Guess, Neural
from aparte.speculate.settings import Decoding
from aparte.speculate.tree import BELOW_ROOT, DraftTree
from running import FLOAT32

VOCAB = 256


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rule:
    """A model that guesses by a rule from the path's last token; each pass takes ``pass_ms``."""

    def __init__(
        self, rule: Callable[[int], Guess], clock: Clock | None = None, pass_ms: float = 0.0
    ) -> None:
        self._rule = rule
        self._clock = clock or Clock()
        self._pass_s = pass_ms / 1e3
        self.levels: list[list[tuple[int, int]]] = []  # (parent, token) of every extend
        self.begun = 0

    def begin(self, context: Sequence[int]) -> Guess | None:
        self.begun += 1
        self.levels = []
        self._clock.now += self._pass_s
        return self._rule(context[-1])

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        known = sum(map(len, self.levels))
        assert all(BELOW_ROOT <= parent < known for parent in parents)
        self.levels.append(list(zip(parents, tokens, strict=True)))
        self._clock.now += self._pass_s
        return [self._rule(token) for token in tokens]


def two(token: int, first: float = 0.8, second: float = 0.1) -> Guess:
    return Guess(((token + 1) % VOCAB, (token + 7) % VOCAB), (first, second))


def step(drafter: Merged, context: list[int], budget: int = 16) -> Outcome:
    """One round trip with a target that counts up."""
    tree = drafter.propose(context, budget)
    choices = tuple((token + 1) % VOCAB for token in (context[-1], *tree.tokens))
    outcome = Outcome(tree, choices, accept(tree, choices), torch.zeros(len(choices), VOCAB))
    drafter.observe(outcome)
    context += outcome.accepted.tokens
    return outcome


def test_a_level_is_one_pass_over_the_most_probable_nodes() -> None:
    model = Rule(two)
    source = Neural("m", model, width=2, depth=3)
    assert source.start([10]) == BELOW_ROOT
    # 11 (0.8) and 17 (0.1); then 12 (0.64) and of the rest with 0.08 the older one; then 13 and so on.
    assert model.levels[0] == [(-1, 11), (-1, 17)]
    assert model.levels[1] == [(0, 12), (0, 18)]
    assert model.levels[2] == [(2, 13), (1, 18)]


def test_places_follow_the_nodes_and_end_where_the_model_did_not_look() -> None:
    source = Neural("m", Rule(two), width=1, depth=2)
    place = source.start([10])
    assert [candidate.token for candidate in source.candidates(place)] == [11, 17]
    assert source.candidates(source.advance(place, 17)) == []  # guessed, but not looked below
    assert source.advance(place, 99) is None
    deeper = source.advance(place, 11)
    assert [candidate.token for candidate in source.candidates(deeper)] == [12, 18]
    assert source.candidates(source.advance(deeper, 12))[0].token == 13
    assert source.advance(source.advance(place, 99), 11) is None


def test_the_first_estimate_is_the_models_own() -> None:
    source = Neural("m", Rule(two))
    assert [candidate.prior for candidate in source.candidates(source.start([1]))] == [0.8, 0.1]


def test_kinds_tell_probabilities_apart_most_finely_at_the_ends() -> None:
    def kind(probability: float, depth: int = 0) -> object:
        source = Neural("m", Rule(lambda token: Guess((token + 1,), (probability,))), width=1, depth=6)
        place = source.start([1])
        for token in range(2, 2 + depth):
            place = source.advance(place, token)
        return source.candidates(place)[0].kind

    assert len({kind(p) for p in (0.005, 0.02, 0.05, 0.5, 0.85, 0.93, 0.97, 0.995)}) == 8
    assert kind(0.45) == kind(0.55)
    assert kind(0.9, depth=0) != kind(0.9, depth=1) != kind(0.9, depth=4)


def test_a_right_model_is_accepted_to_its_depth() -> None:
    drafter = Merged([Neural("m", Rule(two), width=2, depth=5)])
    assert step(drafter, [1]).accepted.tokens == (2, 3, 4, 5, 6, 7, 8)  # five passes see six tokens ahead


def test_confidence_is_corrected_by_experience() -> None:
    """Always 0.9 for a token that never comes: the tree shrinks."""
    model = Rule(lambda token: two(token + 1, 0.9, 0.05))
    drafter, context = Merged([Neural("m", model, clock=Clock())]), [1]
    before = drafter.propose(context, 16).probabilities[0]
    for _ in range(40):
        step(drafter, context)
    assert before == pytest.approx(0.9)
    assert drafter.propose(context, 16).probabilities[0] < 0.2


def test_a_model_that_cannot_start_offers_nothing() -> None:
    class Late(Rule):
        def begin(self, context: Sequence[int]) -> Guess | None:
            return None if len(context) % 2 else super().begin(context)

    source = Neural("m", Late(two))
    assert source.start([1, 2, 3]) is None
    assert source.candidates(None) == []
    assert source.advance(None, 5) is None
    assert source.start([1, 2]) == BELOW_ROOT


def test_what_ran_ahead_does_not_confuse_what_was_proposed_before() -> None:
    """Two proposals outstanding: the outcome of the first teaches about the first."""
    source = Neural("m", Rule(two))
    source.start([10])
    source.start([10, 11, 12])  # ahead of what is verified
    tree = DraftTree((11, 12), (-1, 0), (0.8, 0.6))
    choices = (11, 12, 99)
    source.learn([10], Outcome(tree, choices, accept(tree, choices), torch.zeros(3, VOCAB)))
    place = source.start([10, 11])  # the second one was wrong; back to a shorter context
    assert [candidate.token for candidate in source.candidates(place)] == [12, 18]
    tree = DraftTree((12,), (-1,), (0.8,))
    source.learn([10, 11], Outcome(tree, (99, 13), accept(tree, (99, 13)), torch.zeros(2, VOCAB)))


def test_what_an_earlier_outcome_told_is_not_counted_again() -> None:
    """A proposal sent ahead: its first accepted token came with the outcome before."""
    clock = Clock()
    source = Neural("m", Rule(two, clock), clock=clock)
    source.start([10])
    source.start([10, 11])
    tree = DraftTree((11,), (-1,), (0.8,))
    source.learn([10], Outcome(tree, (11, 12), accept(tree, (11, 12)), torch.zeros(2, VOCAB)))
    clock.now += 1
    tree = DraftTree((12, 13), (-1, 0), (0.8, 0.6))
    ahead = Outcome(tree, (12, 13, 14), accept(tree, (12, 13, 14)), torch.zeros(3, VOCAB), (10, 11), known=1)
    source.learn([10, 11], ahead)
    assert source.pace.tokens_per_ms == pytest.approx(2 / 1000)
    assert source.pace._foreseen.mean == pytest.approx(1)  # 11; 12 came with its outcome, and 13
    assert source.pace._hits.seen == 4  # 11 and 12, then 13 and 14


# -- Time ------------------------------------------------------------------------------------------


def timed(pass_ms: float, step_ms: float, steps: int = 60) -> tuple[list[int], Rule]:
    """Decode with a model that takes its time and is wrong after every third token.

    Returns the levels of every step, -1 where it was not asked, and the model.
    """
    clock = Clock()
    model = Rule(lambda token: two(token if token % 3 else token + 1), clock, pass_ms)
    source = Neural("m", model, clock=clock)
    drafter, context, levels = Merged([source]), [1], []
    for _ in range(steps):
        begun = model.begun
        outcome = step_with_time(drafter, context, clock, step_ms)
        levels.append(len(model.levels) if model.begun > begun else -1)
        assert outcome.accepted.tokens
    return levels, model


def step_with_time(drafter: Merged, context: list[int], clock: Clock, step_ms: float) -> Outcome:
    clock.now += step_ms / 1e3
    return step(drafter, context)


def test_dear_passes_are_fewer_than_cheap_ones() -> None:
    cheap, _ = timed(pass_ms=0.1, step_ms=100)
    dear, _ = timed(pass_ms=15, step_ms=100)
    assert min(cheap[-10:]) >= 6
    assert 1 <= sum(dear[-10:]) / 10 < 4


def test_a_model_that_costs_more_than_it_brings_is_let_rest_and_tried_again() -> None:
    levels, model = timed(pass_ms=200, step_ms=10, steps=200)
    assert levels.count(-1) > 150
    assert 5 <= model.begun < 50  # but now and then it gets a chance


def test_a_wrong_model_is_let_rest() -> None:
    clock = Clock()
    model = Rule(lambda token: two(token + 1), clock, pass_ms=10)
    drafter, context = Merged([Neural("m", model, clock=clock)]), [1]
    for _ in range(200):
        step_with_time(drafter, context, clock, 50)
    assert model.begun < 60


def test_it_comes_back_when_the_link_gets_slow() -> None:
    clock = Clock()
    model = Rule(two, clock, pass_ms=100)
    drafter, context = Merged([Neural("m", model, clock=clock)]), [1]
    for _ in range(100):
        step_with_time(drafter, context, clock, 5)
    begun = model.begun
    assert begun < 50
    for _ in range(100):
        step_with_time(drafter, context, clock, 2000)
    assert model.begun > begun + 40


def test_pauses_between_answers_are_no_steps() -> None:
    clock = Clock()
    source = Neural("m", Rule(two, clock, 1.0), clock=clock)
    drafter, context = Merged([source]), [1]
    for _ in range(20):
        step_with_time(drafter, context, clock, 100)
    before = source.pace.tokens_per_ms
    context += [5, 6, 7]  # the user's next question
    step_with_time(drafter, context, clock, 3_600_000)
    assert source.pace.tokens_per_ms == before


# -- Models that err -------------------------------------------------------------------------------


class Hostile:
    """Does at the given place what no model should."""

    def __init__(self, what: str) -> None:
        self._what = what

    def begin(self, context: Sequence[int]) -> Guess | None:
        if self._what == "raising at once":
            raise RuntimeError("out of memory")
        return self._guess(context[-1])

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> Any:
        if self._what == "raising":
            raise ValueError("no")
        if self._what == "too few rows":
            return [two(token) for token in tokens[1:]]
        if self._what == "too many rows":
            return [two(token) for token in (*tokens, 1)]
        if self._what == "no rows":
            return None
        return [self._guess(token) for token in tokens]

    def _guess(self, token: int) -> Any:
        odd: dict[str, Guess | None] = {
            "wrong ids": Guess((-1, 10**9, VOCAB + 50, 1.5, None, True, 3), (0.9,) * 7),  # type: ignore[arg-type]
            "twins": Guess((3, 3, 3, 4, 4), (0.9, 0.5, 0.5, 0.8, 0.9)),
            "no numbers": Guess((3, 4, 5, 6), (math.nan, math.inf, -1.0, 2.0)),
            "null": Guess((3, 4), (None, None)),  # type: ignore[arg-type]
            "empty": Guess((), ()),
            "ragged": Guess((3, 4, 5), (0.9,)),
            "no guess": None,
        }
        return odd.get(self._what, two(token))


HOSTILE = [
    "wrong ids",
    "twins",
    "no numbers",
    "null",
    "empty",
    "ragged",
    "no guess",
    "raising",
    "raising at once",
    "too few rows",
    "too many rows",
    "no rows",
]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("what", HOSTILE)
def test_no_model_changes_the_text(llama_folder: Path, what: str, sampling: Sampling) -> None:
    writer = open_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", Cut(2, 2), wire="float32")

    def write(drafter: Drafter) -> list[int]:
        writer.forget()
        writer.codec.eos = frozenset()
        answer, pieces = writer.write(
            writer.codec.encode("the cat sat on the mat and the cat"),
            drafter,
            sampling=sampling,
            decoding=Decoding("context", max_nodes=16),
            stopping=Stopping(24),
        )
        list(pieces)
        return answer.token_ids

    expected = write(Nothing())
    assert write(Merged([Neural("m", Hostile(what)), Context()])) == expected


@pytest.mark.parametrize("what", HOSTILE)
def test_only_proper_candidates_come_out(what: str) -> None:
    source = Neural("m", Hostile(what))
    said = source.candidates(source.start([1, 2]))
    assert all(type(candidate.token) is int and candidate.token >= 0 for candidate in said)
    assert all(0 <= candidate.prior <= 1 for candidate in said)
    assert len({candidate.token for candidate in said}) == len(said)


def test_of_twins_the_first_counts() -> None:
    source = Neural("m", Hostile("twins"))
    said = source.candidates(source.start([1]))
    assert [(candidate.token, candidate.prior) for candidate in said] == [(3, 0.9), (4, 0.8)]


@pytest.mark.parametrize("what", ["too few rows", "too many rows"])
def test_rows_that_cannot_be_told_apart_are_not_used(what: str) -> None:
    source = Neural("m", Hostile(what))
    place = source.start([1])
    assert [candidate.token for candidate in source.candidates(place)] == [2, 8]
    assert source.advance(place, 2) is None


def test_what_was_said_before_a_failure_is_used() -> None:
    source = Neural("m", Hostile("raising"))
    assert [candidate.token for candidate in source.candidates(source.start([1]))] == [2, 8]


def test_a_model_that_keeps_failing_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    source = Neural("m", Hostile("raising at once"))
    for _ in range(MAX_FAILURES + 5):
        assert source.start([1]) is None
    assert len(caplog.records) == MAX_FAILURES
    assert "left alone" in caplog.text
    assert "out of memory" not in caplog.text  # what an error says may hold what it was about
