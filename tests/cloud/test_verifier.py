"""The verifier without a network: tokens in, the whole model's choices out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aparte.cloud.batch import run_alone
from aparte.cloud.sessions import LimitError
from aparte.cloud.verifier import Verifier, VerifierSession, load_verifier
from aparte.config import Sampling, ServerLimits
from aparte.distribution import Distribution
from aparte.errors import FrameError, SlotError, WireOverflowError
from aparte.model.parts import Blueprint
from aparte.rejection import UNDECIDED, draw
from aparte.sampling import choose, process
from aparte.step import ROOT, Step, chain_parents
from aparte.target.base import Ask
from aparte.target.local import LocalTarget
from aparte.wire.blocks import HEAD_BYTES, NODE_BYTES, Block, certain, judged, read_verdict, write_block
from aparte.wire.tensors import TensorCodec
from running import FLOAT32

WIDTH, VOCAB, LAYERS = 32, 300, 6
LIMITS = ServerLimits(max_nodes_per_step=16, max_pending_nodes=40)
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=11)
PROMPT = (20, 21, 22, 23)
#: The prompt's last token, and a tree below it.
TREE = Step(2, 0, 2, 3, (2, 3, 3, 4, 6, 5))
TREE_TOKENS = (23, 40, 41, 42, 43, 44)


@pytest.fixture(scope="module")
def blueprint(llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, FLOAT32)


@pytest.fixture(scope="module")
def verifier(blueprint: Blueprint) -> Verifier:
    return load_verifier(blueprint, "tiny", LIMITS)


@pytest.fixture
def session(verifier: Verifier) -> VerifierSession:
    return verifier.open("float32")


def run(session: VerifierSession, step: Step, block: Block) -> tuple[tuple[int, ...], memoryview]:
    payload = run_alone(session, step, write_block(block)).payload
    verdict = read_verdict(payload, step, block, VOCAB)
    return verdict.choices, memoryview(verdict.states)


def chain(tip: int, count: int) -> Step:
    return Step(1, 0, tip, tip + 1, chain_parents(tip, tip + 1, count))


def prefill(session: VerifierSession, tokens: tuple[int, ...] = PROMPT[:-1]) -> None:
    run(session, chain(ROOT, len(tokens)), Block(tokens, len(tokens), Sampling()))


@pytest.fixture(scope="module")
def tree_logits(blueprint: Blueprint) -> torch.Tensor:
    """The model's logits ``[6, V]`` after each node of :data:`TREE`."""
    target = LocalTarget(blueprint)
    target.submit(chain(ROOT, 3), PROMPT[:-1], Ask(3))
    target.collect()
    target.submit(TREE, TREE_TOKENS, Ask(0))
    return target.collect().logits


# -- Choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, replace(SAMPLED, top_k=5, min_p=0.1)])
def test_choices_are_those_that_a_device_with_the_logits_would_make(
    session: VerifierSession, tree_logits: torch.Tensor, sampling: Sampling
) -> None:
    prefill(session)
    choices, rest = run(session, TREE, Block(TREE_TOKENS, 0, sampling))
    positions = [4, 5, 5, 6, 7, 6]  # of the tokens after each node
    assert list(choices) == choose(tree_logits, positions, sampling)
    assert not rest


def test_only_what_is_asked_for_gets_a_choice(session: VerifierSession) -> None:
    prefill(session)
    every, _ = run(session, TREE, Block(TREE_TOKENS, 0, Sampling()))
    some, _ = run(session, TREE, Block(TREE_TOKENS, 4, Sampling()))
    none, _ = run(session, TREE, Block(TREE_TOKENS, 6, Sampling()))
    assert some == every[4:]
    assert none == ()


def test_a_step_means_the_same_when_it_is_repeated(session: VerifierSession) -> None:
    prefill(session)
    once = run(session, TREE, Block(TREE_TOKENS, 0, SAMPLED))
    assert run(session, TREE, Block(TREE_TOKENS, 0, SAMPLED)) == once


# -- States ----------------------------------------------------------------------------------------


def test_the_states_of_what_is_certain_come_back(session: VerifierSession, blueprint: Blueprint) -> None:
    prefill(session)
    first, _ = run(session, TREE, Block(TREE_TOKENS, 0, Sampling()))
    tokens = (*TREE_TOKENS[:1], first[0], *TREE_TOKENS[2:])  # the first draft is right
    block = Block(tokens, 0, Sampling(), layer=4)
    choices, rest = run(session, TREE, block)
    nodes = certain(TREE, block, choices)
    assert nodes[:2] == (0, 1)
    assert 2 not in nodes
    states = TensorCodec("float32", WIDTH).decode(rest, len(nodes))
    embed, _ = blueprint.ends()
    stage = blueprint.stage(range(4))
    cache = stage.new_cache()
    stage.forward(cache, chain(ROOT, 3), embed(torch.tensor(PROMPT[:-1])))
    expected = stage.forward(cache, TREE, embed(torch.tensor(tokens)))[list(nodes)]
    assert torch.allclose(states, expected, atol=1e-5)


def test_of_a_prompt_all_states_come_back(session: VerifierSession) -> None:
    _, rest = run(session, chain(ROOT, 3), Block(PROMPT[:-1], 3, Sampling(), layer=LAYERS))
    assert len(rest) == 3 * WIDTH * 4


# -- Rejection -------------------------------------------------------------------------------------


def judge_often(session: VerifierSession, seeds: range, q: Distribution) -> list[tuple[int, int, int]]:
    """One drafted token per seed, drawn from ``q``: it, the choice before it and the choice after it."""
    results = []
    step = Step(2, 0, 2, 3, (2, 3))
    for seed in seeds:
        sampling = replace(SAMPLED, seed=seed)
        (token,) = draw(q, 1, seed=seed, position=4)
        block = Block((PROMPT[-1], token), 0, sampling, rejection=True, drawn=(q,))
        (before, after), _ = run(session, step, block)
        results.append((token, before, after))
    return results


def chi_square(counts: Counter[int], p: torch.Tensor, draws: int) -> tuple[float, int]:
    """Statistic and degrees of freedom; tokens expected fewer than five times are one class."""
    statistic, seen, expected_rest, classes = 0.0, 0, float(draws), 0
    for token, share in enumerate((p * draws).tolist()):
        if share >= 5:
            statistic += (counts[token] - share) ** 2 / share
            seen += counts[token]
            expected_rest -= share
            classes += 1
    if expected_rest >= 5:
        statistic += (draws - seen - expected_rest) ** 2 / expected_rest
        classes += 1
    return statistic, classes - 1


def is_plausible(counts: Counter[int], p: torch.Tensor, draws: int) -> bool:
    """Within four standard deviations of a chi-square's mean (Wilson and Hilferty)."""
    statistic, freedom = chi_square(counts, p, draws)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 4


def test_rejection_gives_the_models_own_distribution_even_with_a_bad_draft(
    session: VerifierSession, tree_logits: torch.Tensor
) -> None:
    """And the choice without the residual, of what was drafted alone, does not."""
    prefill(session)
    p = process(tree_logits[:1], SAMPLED).softmax(dim=-1)[0]
    best = p.argsort(descending=True)[:6].tolist()
    bad = Distribution((*best[:4], 7), (0.05, 0.1, 0.15, 0.3, 0.4))
    draws = 1000
    results = judge_often(session, range(draws), bad)
    assert is_plausible(Counter(before for _, before, _ in results), p, draws)
    assert not is_plausible(Counter(token for token, _, _ in results), p, draws)
    assert all((after == UNDECIDED) == (token != before) for token, before, after in results)
    accepted = sum(token == before for token, before, _ in results)
    assert 0 < accepted < draws


def test_what_was_named_without_drawing_is_judged_too(
    session: VerifierSession, tree_logits: torch.Tensor
) -> None:
    prefill(session)
    p = process(tree_logits[:1], SAMPLED).softmax(dim=-1)[0]
    token = int(p.argsort(descending=True)[1])
    step = Step(2, 0, 2, 3, (2, 3))
    counts: Counter[int] = Counter()
    for seed in range(700):
        block = Block((PROMPT[-1], token), 0, replace(SAMPLED, seed=seed), rejection=True)
        counts[run(session, step, block)[0][0]] += 1
    assert is_plausible(counts, p, 700)


def test_without_a_temperature_rejection_is_greedy(session: VerifierSession) -> None:
    prefill(session)
    greedy = run(session, TREE, Block(TREE_TOKENS, 0, Sampling()))
    q = Distribution.only(40)
    block = Block(TREE_TOKENS, 0, Sampling(), rejection=True, drawn=(q,) * len(judged(TREE, 0)))
    assert run(session, TREE, block) == greedy


def test_below_a_path_foreseen_each_root_is_judged_by_itself(session: VerifierSession) -> None:
    """The same choices as if the step before had told which of the roots it is."""
    q = Distribution((50, 51, 60, 61), (0.25,) * 4)
    prefill(session, PROMPT)
    ahead = Step(2, 0, 3, 4, (3, 3, 4, 4, 5))  # two roots, with two drafts and one
    tokens = (30, 31, 50, 51, 60)
    both, _ = run(session, ahead, Block(tokens, 0, SAMPLED, True, drawn=(q,) * 3))
    first, _ = run(
        session, Step(3, 1, 3, 4, (3, 4, 4)), Block((30, 50, 51), 0, SAMPLED, True, drawn=(q,) * 2)
    )
    second, _ = run(session, Step(4, 2, 3, 4, (3, 4)), Block((31, 60), 0, SAMPLED, True, drawn=(q,)))
    assert (both[0], both[2], both[3]) == first
    assert (both[1], both[4]) == second


def test_a_token_that_was_not_drawn_from_its_distribution_is_refused(session: VerifierSession) -> None:
    prefill(session)
    block = Block((23, 40), 0, SAMPLED, True, drawn=(Distribution.only(41),))
    with pytest.raises(FrameError, match="does not give"):
        run(session, Step(2, 0, 2, 3, (2, 3)), block)


# -- Limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [VOCAB, 2**32 - 1])
def test_an_id_that_the_model_does_not_have_is_refused_before_anything_is_computed(
    session: VerifierSession, token: int
) -> None:
    with pytest.raises(FrameError, match="it has 300 tokens"):
        run_alone(session, chain(ROOT, 2), write_block(Block((1, token), 0, Sampling())))
    assert session.nbytes == 0


def test_the_same_holds_for_ids_in_distributions(session: VerifierSession) -> None:
    q = Distribution((40, VOCAB), (0.5, 0.5))
    with pytest.raises(FrameError, match="it has 300 tokens"):
        run_alone(session, chain(ROOT, 2), write_block(Block((1, 40), 0, SAMPLED, True, drawn=(q,))))
    assert session.nbytes == 0


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.8, seed=3)])
@pytest.mark.parametrize("rejection", [False, True])
def test_the_most_probable_tokens_are_named(
    session: VerifierSession, blueprint: Blueprint, how: Sampling, rejection: bool
) -> None:
    """Beside every choice, by the model's own distribution: temperature and seed do not matter."""
    step, tokens = chain(-1, 4), (5, 6, 7, 8)
    block = Block(tokens, 1, how, rejection, likely=3)
    payload = run_alone(session, step, write_block(block)).payload
    rows = read_verdict(payload, step, block, VOCAB).likely
    embed, head = blueprint.ends()
    stage = blueprint.stage(range(blueprint.layers))
    expected = head(stage.forward(stage.new_cache(), step, embed(torch.tensor(tokens)))).softmax(dim=-1)[1:]
    assert len(rows) == 3
    for row, shares in zip(rows, expected, strict=True):
        best = shares.topk(3)
        assert [token for token, _ in row] == best.indices.tolist()
        assert [share for _, share in row] == pytest.approx(best.values.tolist(), rel=2e-3)


def test_more_tokens_than_there_are_cannot_be_named(blueprint: Blueprint) -> None:
    small = load_verifier(blueprint, "tiny", LIMITS).open("float32")
    small._vocab_size = 8
    with pytest.raises(FrameError, match="asks for 9 tokens"):
        small.read(chain(-1, 2), write_block(Block((1, 2), 0, Sampling(), likely=9)))


def test_a_layer_that_is_not_there_is_refused(session: VerifierSession) -> None:
    with pytest.raises(FrameError, match="this model has 6"):
        run_alone(session, chain(ROOT, 1), write_block(Block((1,), 0, Sampling(), layer=LAYERS + 1)))
    assert session.nbytes == 0


def test_limits_are_those_of_split_mode(session: VerifierSession) -> None:
    with pytest.raises(LimitError, match="17 nodes; this server takes 16"):
        run_alone(session, chain(ROOT, 17), write_block(Block((1,) * 17, 0, Sampling())))
    with pytest.raises(FrameError, match="should have"):
        session.check(chain(ROOT, 2), write_block(Block((1,), 0, Sampling())))
    with pytest.raises(SlotError, match="does not hold"):
        run_alone(session, chain(7, 1), write_block(Block((1,), 0, Sampling())))


def test_the_largest_message_is_a_full_step_with_the_widest_distributions(verifier: Verifier) -> None:
    assert verifier.max_message_bytes == 16 * NODE_BYTES + HEAD_BYTES + 65_536


def test_it_says_that_it_serves_the_whole_model(verifier: Verifier) -> None:
    assert verifier.fingerprint.cut == "whole"
    verifier.probe()
    assert verifier.row_bytes == LAYERS * 2 * 2 * 8 * 4  # keys and values, heads, their width, float32


class Broken:
    """A head that gives what is not a number."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden), VOCAB), float("nan"))


def test_nothing_is_chosen_by_what_is_no_number(verifier: Verifier, session: VerifierSession) -> None:
    session._head = Broken()  # type: ignore[assignment]
    with pytest.raises(WireOverflowError, match="not finite"):
        run(session, chain(ROOT, 2), Block((1, 2), 1, Sampling()))
