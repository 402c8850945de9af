"""Sources, one by one and merged into one tree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aparte.errors import UserError
from aparte.speculate.accept import accept
from aparte.speculate.calibration import START_WEIGHT, Calibration, measured_before
from aparte.speculate.context import Context
from aparte.speculate.drafter import Outcome, make_drafter
from aparte.speculate.merge import Merged
from aparte.speculate.recycling import Recycling, RunnerUp
from aparte.speculate.settings import Decoding
from aparte.speculate.source import Candidate
from aparte.speculate.tree import BELOW_ROOT, DraftTree

VOCAB = 64


def outcome(tree: DraftTree, choices: Sequence[int], logits: torch.Tensor | None = None) -> Outcome:
    if logits is None:
        logits = torch.zeros(len(choices), VOCAB)
        logits[range(len(choices)), list(choices)] = 10.0
    return Outcome(tree, tuple(choices), accept(tree, choices), logits)


def decode(drafter: Merged, prompt: list[int], text: list[int], budget: int) -> int:
    """Write ``text`` after ``prompt`` with a target that follows it; returns the round trips."""
    context, trips = list(prompt), 0
    whole = [*prompt, *text]
    while len(context) < len(whole):
        tree = drafter.propose(context, budget)
        assert len(tree) <= budget
        assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)
        depth = [0, *tree.depths()]
        choices = [whole[min(len(context) + d, len(whole) - 1)] for d in depth]
        result = outcome(tree, choices)
        drafter.observe(result)
        context += result.accepted.tokens
        trips += 1
    return trips


def test_context_copies_what_was_said_before() -> None:
    passage = list(range(10, 40))
    trips = decode(Merged([Context()]), [1, *passage, 2], [10, 11, *passage[2:]], budget=8)
    assert trips <= 6


def test_context_prefers_the_longest_match() -> None:
    source = Context()
    # "1 2" was followed by 7 twice, "0 1 2" by 8 once.
    place = source.start([1, 2, 7, 1, 2, 7, 0, 1, 2, 8, 5, 0, 1, 2])
    assert source.candidates(place)[0].token == 8


def test_another_conversation_starts_over() -> None:
    source = Context()
    source.start([1, 2, 3, 1, 2])
    assert source.candidates(source.start([9, 8, 7])) == []


def test_recycling_remembers_rejected_nodes_too() -> None:
    source = Recycling()
    tree = DraftTree((20, 21), (-1, 0), (0.5, 0.4))
    source.learn([5, 6], outcome(tree, (30, 31, 32)))  # nothing accepted
    assert source.candidates(source.start([6, 20]))[0].token == 31
    assert source.candidates(source.start([20, 21]))[0].token == 32
    assert source.candidates(source.start([5, 6]))[0].token == 30
    # The pair is remembered apart from its last token.
    source.learn([9, 20], outcome(DraftTree(), (40,)))
    assert source.candidates(source.start([6, 20]))[0].token == 31
    assert source.candidates(source.start([1, 20]))[0].token == 40


def test_runner_up_offers_what_nearly_came() -> None:
    source, logits = RunnerUp(), torch.zeros(1, VOCAB)
    logits[0, [3, 4, 5]] = torch.tensor([9.0, 8.0, 7.0])
    source.learn([1], outcome(DraftTree(), (3,), logits))
    assert [candidate.token for candidate in source.candidates(source.start([1, 3]))] == [4, 5]
    assert source.candidates(source.advance(True, 4)) == []


def test_calibration_moves_from_the_first_guess_to_what_is_seen() -> None:
    calibration, candidate = Calibration(), Candidate(1, ("kind",), prior=0.9)
    assert calibration.probability(candidate) == pytest.approx(0.9)
    for hit in [True, False, False, False] * 50:
        calibration.record(candidate, hit)
    assert calibration.probability(candidate) == pytest.approx(0.25, abs=0.03)
    assert calibration.probability(Candidate(1, ("another",), prior=0.5)) == 0.5


def test_the_starting_point_is_bounded_and_of_known_kinds() -> None:
    counts = measured_before()
    assert len(counts) > 40
    assert all(0 <= hits <= trials <= START_WEIGHT + 1e-9 for trials, hits in counts.values())
    # The kinds must be those that the sources use, or the file would be of no use.
    drafter = make_drafter(Decoding("auto"))
    assert isinstance(drafter, Merged)
    decode(drafter, [1, 2, 3], [1, 2, 4, 1, 2, 5, 1, 2, 6] * 3, budget=16)
    seen = {kind for kind, (trials, _) in drafter.calibration.counts.items() if trials > START_WEIGHT + 1e-9}
    changed = {kind for kind, value in drafter.calibration.counts.items() if counts.get(kind) != value}
    assert changed & counts.keys()
    assert seen <= changed


def test_proposals_that_run_ahead_are_kept_apart_until_their_outcome_comes() -> None:
    heard: list[tuple[int, ...]] = []

    class Two:
        """Always sure of the token two further on."""

        def start(self, context: Sequence[int]) -> int:
            return context[-1]

        def candidates(self, place: int) -> list[Candidate]:
            return [Candidate(place + 2, ("two",), 0.9)]

        def advance(self, place: int, token: int) -> int:
            return token

        def learn(self, context: Sequence[int], outcome: Outcome) -> None:
            heard.append(tuple(context))

    drafter = Merged([Two()])
    trials = lambda: drafter.calibration.counts.get(("two",), (0.0, 0.0))[0]  # noqa: E731
    first = drafter.propose([2], 2)
    ahead = drafter.propose([2, 4, 6], 2)
    further = drafter.propose([2, 4, 6, 8, 10], 2)
    assert (first.tokens, ahead.tokens, further.tokens) == ((4, 6), (8, 10), (12, 14))

    def tell(tree: DraftTree, context: tuple[int, ...], choices: tuple[int, ...], known: int = 0) -> None:
        logits = torch.zeros(len(choices), VOCAB)
        drafter.observe(Outcome(tree, choices, accept(tree, choices), logits, context, known))

    tell(first, (2,), (4, 6, 8))
    assert trials() == pytest.approx(3, abs=0.1)
    tell(ahead, (2, 4, 6), (8, 11, 0), known=1)  # 8 was counted above
    assert trials() == pytest.approx(4, abs=0.1)
    # So what ran further ahead was wrong. Its place is taken by what comes next.
    fresh = drafter.propose([2, 4, 6, 8, 11], 2)
    tell(fresh, (2, 4, 6, 8, 11), (13, 0, 0))
    assert heard == [(2,), (2, 4, 6), (2, 4, 6, 8, 11)]


def test_guesses_are_no_part_of_what_was_said() -> None:
    """A context that runs ahead is matched, not learned; what is verified is."""
    source = Context()
    text = [1, 2, 3, 9, 1, 2]
    source.start(text)
    ahead = source.start([*text, 3, 9])  # 3 is guessed, and 9
    assert [candidate.token for candidate in source.candidates(ahead)][:1] == [1]
    tree = DraftTree((3, 9), (-1, 0), (0.9, 0.9))
    source.learn(text, Outcome(tree, (5, 0, 0), accept(tree, (5, 0, 0)), torch.zeros(3, VOCAB)))
    fresh = Context()
    verified = [*text, 5]
    assert source.candidates(source.start(verified)) == fresh.candidates(fresh.start(verified))
    assert source.candidates(source.start([*verified, 1, 2])) == fresh.candidates(
        fresh.start([*verified, 1, 2])
    )


def test_a_source_that_is_always_wrong_loses_its_place() -> None:
    class Wrong:
        """Sure of itself, and never right."""

        def start(self, context: Sequence[int]) -> int:
            return 0

        def candidates(self, place: int) -> list[Candidate]:
            return [Candidate(60 + rank, ("wrong", rank), 0.9) for rank in range(3)] if not place else []

        def advance(self, place: int, token: int) -> int:
            return 1

        def learn(self, context: Sequence[int], outcome: Outcome) -> None:
            pass

    passage = list(range(10, 40))
    drafter = Merged([Wrong(), Context()])
    decode(drafter, [1], passage * 4, budget=4)
    tree = drafter.propose([1, *passage * 4, *passage[:5]], 4)
    assert 60 not in tree.tokens
    assert tree.tokens[0] == passage[5]


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 12))
def test_trees_are_proper_whatever_the_text(text: list[int], budget: int) -> None:
    drafter = make_drafter(Decoding("auto"))
    assert isinstance(drafter, Merged)
    assert decode(drafter, [0, 1], text, budget) <= len(text)


def test_estimates_below_one_node_never_add_up_to_more_than_one() -> None:
    drafter = make_drafter(Decoding("auto"))
    assert isinstance(drafter, Merged)
    decode(drafter, [1, 2, 3], [1, 2, 4, 1, 2, 5, 1, 2, 6] * 3, budget=16)
    tree = drafter.propose([1, 2, 3, *[1, 2, 4, 1, 2, 5, 1, 2, 6] * 3, 1, 2], 32)
    for node in range(-1, len(tree)):
        own = 1.0 if node < 0 else tree.probabilities[node]
        below = [p for p, parent in zip(tree.probabilities, tree.parents, strict=True) if parent == node]
        assert sum(below) <= own + 1e-9


@pytest.mark.parametrize("name", ["magic", "context+magic", "auto+context", "context+", ""])
def test_unknown_combinations_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        Decoding(name)


def test_combinations_and_limits() -> None:
    assert Decoding("context+recycling").sources == ("context", "recycling")
    assert Decoding("auto").automatic
    assert Decoding("auto").node_limit == 32
    assert not Decoding("auto", max_nodes=8).automatic
    assert Decoding("lookahead").node_limit == 12


class Fixed:
    """Names ``tokens`` one after the other, each with ``chance``; keeps what it was told to have gained."""

    def __init__(self, name: str, tokens: Sequence[int], chance: float) -> None:
        self.name, self.tokens, self.chance = name, tokens, chance
        self.gained: list[int | None] = []

    def start(self, context: Sequence[int]) -> int:
        return 0

    def candidates(self, place: int) -> list[Candidate]:
        if place >= len(self.tokens):
            return []
        return [Candidate(self.tokens[place], (self.name,), self.chance)]

    def advance(self, place: int, token: int) -> int:
        return place + 1 if place < len(self.tokens) and token == self.tokens[place] else len(self.tokens)

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        self.gained.append(outcome.gained)


@pytest.mark.parametrize(
    ("other", "chance", "gained"),
    [
        ((1, 2, 3, 4), 0.9, 0),  # would have brought all of it
        ((1, 2), 0.9, 2),  # the first two
        ((), 0.9, 4),  # nothing
        ((1, 2, 3, 4), 0.3, 4),  # it named them, but not so that they would have been sent
    ],
)
def test_a_source_gains_what_the_others_would_not_have_brought(
    other: tuple[int, ...], chance: float, gained: int
) -> None:
    first, second = Fixed("first", (1, 2, 3, 4), 0.9), Fixed("second", other, chance)
    drafter = Merged([first, second])
    drafter.calibration = Calibration(start={})
    tree = drafter.propose([9], 4)
    drafter.observe(outcome(tree, (1, 2, 3, 4, 5)))
    assert first.gained == [gained]
    assert second.gained == [0]


def test_nothing_is_gained_without_an_accepted_node() -> None:
    source = Fixed("only", (1, 2), 0.9)
    drafter = Merged([source])
    drafter.observe(outcome(drafter.propose([9], 4), (7, 7, 7)))
    assert source.gained == [0]


def test_agreement_counts_and_the_sure_one_is_not_scaled_down() -> None:
    """Estimates are one by one; beside others each is worth what the likelier ones leave."""

    def chances(*sources: Fixed) -> dict[int, float]:
        drafter = Merged(sources)
        drafter.calibration = Calibration(start={})
        tree = drafter.propose([9], 8)
        return {
            token: probability
            for token, parent, probability in zip(tree.tokens, tree.parents, tree.probabilities, strict=True)
            if parent == BELOW_ROOT
        }

    sure, unsure, other = Fixed("a", (1,), 0.8), Fixed("b", (2,), 0.6), Fixed("c", (1,), 0.5)
    assert chances(sure, unsure) == pytest.approx({1: 0.8, 2: 0.2 * 0.6})
    assert chances(sure, other) == pytest.approx({1: 1 - 0.2 * 0.5})
    together = chances(sure, unsure, other)
    assert together == pytest.approx({1: 0.9, 2: 0.1 * 0.6})
    assert sum(together.values()) <= 1


def test_sources_that_err_together_are_found_out() -> None:
    """Both name the same token, which is right every other time: to each other they are no confirmation."""
    drafter = Merged([Fixed("a", (1,), 0.5), Fixed("b", (1,), 0.5)])
    drafter.calibration = Calibration(start={})
    first = drafter.propose([9], 1).probabilities[0]
    assert first == pytest.approx(0.75)
    for number in range(200):
        tree = drafter.propose([9, number], 1)
        drafter.observe(outcome(tree, (1 if number % 2 else 2, 3)))
    assert drafter.propose([9], 1).probabilities[0] == pytest.approx(0.5, abs=0.05)
