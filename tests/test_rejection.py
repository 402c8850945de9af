"""Rejection sampling gives the target's distribution, whatever the draft; and wrong variants are found out.

A *world* is a target and a draft that are tables: logits from the tokens before. Many texts of
three tokens are written with fixed seeds, as the decoding loop would, and their counts are compared with the
product of the target's probabilities by a chi-square test.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from aparte.config import Sampling
from aparte.distribution import Distribution
from aparte.rejection import UNDECIDED, Noise, draw, judge
from aparte.sampling import gumbel_noise, process
from aparte.speculate.accept import accept
from aparte.speculate.tree import BELOW_ROOT, DraftTree

VOCAB, LENGTH, TEXTS = 4, 3, 1200
Judge = Callable[..., tuple[int, ...]]


class World:
    """``p`` and ``q`` after every prefix; ``closeness`` 1 makes them equal, 0 unrelated."""

    def __init__(
        self, temperature: float = 1.0, closeness: float = 0.5, top: int = VOCAB, **more: float
    ) -> None:
        self._sampling = Sampling(temperature=temperature, **more)  # type: ignore[arg-type]
        self._closeness = closeness
        self._top = top
        self._p: dict[tuple[int, ...], torch.Tensor] = {}
        self._q: dict[tuple[int, ...], Distribution] = {}

    def p(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self._p:
            self._p[prefix] = process(self._logits(prefix, 0)[None], self._sampling).softmax(-1)[0]
        return self._p[prefix]

    def q(self, prefix: tuple[int, ...]) -> Distribution:
        """The draft's ``top`` tokens."""
        if prefix not in self._q:
            near = self._closeness * self._logits(prefix, 0) + (1 - self._closeness) * self._logits(prefix, 1)
            scaled = near / self._sampling.temperature
            best = scaled.topk(self._top)
            self._q[prefix] = Distribution(
                tuple(best.indices.tolist()), tuple(best.values.softmax(-1).tolist())
            )
        return self._q[prefix]

    def _logits(self, prefix: tuple[int, ...], whose: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((whose, *prefix)) % 2**31)
        return 1.5 * torch.randn(VOCAB, generator=generator)


def chain(world: World, prefix: tuple[int, ...], seed: int, length: int = 2) -> DraftTree:
    """A block that is drawn token by token."""
    tokens: list[int] = []
    drawn: list[Distribution] = []
    for _ in range(length):
        path = (*prefix, *tokens)
        drawn.append(world.q(path))
        tokens += draw(drawn[-1], 1, seed=seed, position=len(path))
    return DraftTree(tuple(tokens), tuple(range(-1, length - 1)), (0.5,) * length, tuple(drawn))


def tree(world: World, prefix: tuple[int, ...], seed: int, widths: Sequence[int] = (2, 3)) -> DraftTree:
    """Siblings without replacement: two at first, three below each of them."""
    tokens: list[int] = []
    parents: list[int] = []
    drawn: list[Distribution] = []
    level = [(BELOW_ROOT, prefix)]
    for width in widths:
        below = []
        for parent, path in level:
            q = world.q(path)
            # Each place of the tree has draws of its own.
            for token in draw(q, width, seed=seed * 1009 + parent + 1, position=len(path)):
                tokens.append(token)
                parents.append(parent)
                drawn.append(q)
                below.append((len(tokens) - 1, (*path, token)))
        level = below
    return DraftTree(tuple(tokens), tuple(parents), (0.5,) * len(tokens), tuple(drawn))


def named(world: World, prefix: tuple[int, ...], seed: int) -> DraftTree:
    """A tree without draws: the two likeliest tokens, and the likeliest below each."""
    a, b = world.q(prefix).tokens[:2]
    below = [world.q((*prefix, token)).tokens[0] for token in (a, b)]
    return DraftTree((a, b, *below), (-1, -1, 0, 1), (0.5,) * 4)


def write(
    world: World, propose: Callable[..., DraftTree], seed: int, verdict: Judge = judge
) -> tuple[int, ...]:
    """One text, block after block."""
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        block = propose(world, text, seed)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(block.tokens, block.parents, strict=True):
            paths.append((*(text if parent == BELOW_ROOT else paths[parent]), token))
        p = torch.stack([world.p(path) for path in (text, *paths)])
        choices = verdict(block.parents, block.tokens, block.drawn, p, Noise(seed, len(text)))
        text += accept(block, choices).tokens
    return text[:LENGTH]


def chi_square(
    world: World, propose: Callable[..., DraftTree], verdict: Judge = judge
) -> tuple[float, float]:
    """The statistic of the counts of whole texts, and what it may be.

    Texts that are expected less than five times are counted together, as is usual. The bound is the quantile
    of 1 - 1e-4 by Wilson and Hilferty's approximation, which is within a per cent from five degrees on.
    """
    counts = Counter(write(world, propose, seed, verdict) for seed in range(TEXTS))
    expected: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = math.prod(float(world.p(text[:at])[token]) for at, token in enumerate(text))
        expected[text] = TEXTS * chance
    assert sum(expected.values()) == pytest.approx(TEXTS, rel=1e-4)
    cells = [(counts[text], want) for text, want in expected.items() if want >= 5]
    rare = [(counts[text], want) for text, want in expected.items() if want < 5]
    if rare:
        cells.append((sum(count for count, _ in rare), max(5.0, sum(want for _, want in rare))))
    freedom = len(cells) - 1
    assert freedom >= 5
    statistic = sum((count - want) ** 2 / want for count, want in cells)
    z = 3.719  # of the normal distribution, 1 - 1e-4
    bound = freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic, bound


WORLDS = {
    "usual": World(),
    "cold": World(temperature=0.6),
    "hot": World(temperature=1.7),
    "truncated draft": World(top=2, closeness=0.8),
    "good draft": World(closeness=0.97),
    "bad draft": World(closeness=0.0),
    "target with top-p": World(top_p=0.8, temperature=1.2),
}


class TestDistribution:
    """The text is the target's."""

    @pytest.mark.parametrize("name", WORLDS)
    def test_of_chains(self, name: str) -> None:
        statistic, bound = chi_square(WORLDS[name], chain)
        assert statistic < bound

    @pytest.mark.parametrize("name", ["usual", "cold", "bad draft"])
    def test_of_trees(self, name: str) -> None:
        statistic, bound = chi_square(WORLDS[name], tree)
        assert statistic < bound

    @pytest.mark.parametrize("name", ["usual", "hot"])
    def test_of_nodes_that_are_named(self, name: str) -> None:
        statistic, bound = chi_square(WORLDS[name], named)
        assert statistic < bound

    def test_siblings_may_be_all_that_the_draft_has(self) -> None:
        statistic, bound = chi_square(World(top=2), lambda world, text, seed: tree(world, text, seed, (2, 2)))
        assert statistic < bound

    def test_the_worst_draft_there_is(self) -> None:
        """It names only what the target likes least."""

        def worst(world: World, text: tuple[int, ...], seed: int) -> DraftTree:
            token = int(world.p(text).argmin())
            return DraftTree((token,), (-1,), (0.5,), (Distribution.only(token),))

        statistic, bound = chi_square(World(), worst)
        assert statistic < bound


class TestWrongVariants:
    """The test finds out what it is there for."""

    def test_acceptance_without_the_residual(self) -> None:
        """After a rejection the token comes from ``p`` itself."""

        def careless(
            parents: Sequence[int],
            tokens: Sequence[int],
            drawn: Sequence[Distribution],
            p: torch.Tensor,
            noise: Noise,
        ) -> tuple[int, ...]:
            choices = [UNDECIDED] * len(p)
            for depth, (token, q) in enumerate(zip(tokens, drawn, strict=True)):
                share = q.probabilities[q.tokens.index(token)]
                if noise.uniform(depth, 0) * share >= p[depth, token]:
                    break
                choices[depth] = token
            else:
                depth = len(tokens)
            choices[depth] = int((p[depth].log() + noise.gumbel(depth, VOCAB)).argmax())
            return tuple(choices)

        statistic, bound = chi_square(World(closeness=0.2), chain, careless)
        assert statistic > 1.5 * bound

    def test_arguments_of_the_maximum_accepted_as_if_drawn(self) -> None:
        """What the prototype of paper B does: the likeliest token, with the random test against its share."""

        def likeliest(world: World, text: tuple[int, ...], seed: int) -> DraftTree:
            q = world.q(text)
            return DraftTree(q.tokens[:1], (-1,), (0.5,), (q,))

        statistic, bound = chi_square(World(), likeliest)
        assert statistic > 3 * bound

    def test_trimming_after_drawing(self) -> None:
        """A block that ends before the first token that the draft thinks unlikely."""

        def trimmed(world: World, text: tuple[int, ...], seed: int) -> DraftTree:
            block = chain(world, text, seed)
            likely = [
                q.probabilities[q.tokens.index(token)] > 0.4
                for token, q in zip(block.tokens, block.drawn, strict=True)
            ]
            return block.head(likely.index(False) if False in likely else len(likely))

        statistic, bound = chi_square(World(), trimmed)
        assert statistic > 3 * bound


class TestVerdict:
    """Single verdicts."""

    P = torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]])
    Q = Distribution((1, 2, 3), (0.2, 0.3, 0.5))

    def test_same_input_same_output(self) -> None:
        block = ((-1, 0), (1, 0), (self.Q, Distribution((0, 3), (0.5, 0.5))), self.P)
        first = [judge(*block, Noise(seed, 7)) for seed in range(20)]
        assert first == [judge(*block, Noise(seed, 7)) for seed in range(20)]
        assert len(set(first)) > 1

    def test_what_the_target_likes_better_is_always_accepted(self) -> None:
        for seed in range(50):
            choices = judge((-1,), (1,), (self.Q,), self.P[:2], Noise(seed, 0))
            assert choices[0] == 1
            assert choices[1] != UNDECIDED

    def test_what_the_target_never_says_is_never_accepted(self) -> None:
        for seed in range(50):
            choices = judge((-1,), (3,), (self.Q,), self.P[:2], Noise(seed, 0))
            assert choices[0] in (0, 1)  # where p is above q
            assert choices[1] == UNDECIDED

    def test_one_more_after_a_block_that_is_accepted(self) -> None:
        p = torch.stack([self.P[0], self.P[2]])
        assert judge((-1,), (1,), (self.Q,), p, Noise(0, 0)) == (1, 2)

    def test_an_empty_block_is_plain_sampling(self) -> None:
        found = Counter(judge((), (), (), self.P[:1], Noise(seed, 3))[0] for seed in range(2000))
        assert found[1] / 2000 == pytest.approx(0.6, abs=0.05)
        assert found[3] == 0

    def test_equal_distributions_accept_everything(self) -> None:
        q = Distribution((0, 1, 2, 3), (0.1, 0.6, 0.3, 0.0))
        for seed in range(50):
            (token,) = draw(q, 1, seed=seed, position=0)
            assert judge((-1,), (token,), (q,), self.P[:2], Noise(seed, 0))[0] == token

    def test_nothing_left_by_rounding_falls_back_to_the_target(self) -> None:
        """``p`` is below ``q`` everywhere, which rounding alone can do: the text goes on."""
        q = Distribution((0, 1), (0.5, 0.5))
        p = torch.tensor([[0.4999, 0.4999], [1.0, 0.0]])

        class Unlucky(Noise):
            def uniform(self, depth: int, rank: int) -> float:
                return 1.0 - 2.0**-53

        chosen = [judge((-1,), (0,), (q,), p, Unlucky(seed, 0)) for seed in range(30)]
        assert {choices[0] for choices in chosen} == {0, 1}
        # The drafted token, if it is the one: then the path goes on below it.
        assert {choices for choices in chosen if choices[0] == 0} == {(0, 0)}

    @pytest.mark.parametrize(
        ("parents", "tokens", "drawn"),
        [
            ((-1,), (0,), (Q,)),  # outside its own distribution
            ((-1, -1), (1, 1), (Q, Q)),  # twice, without replacement
            ((-1,), (4,), ()),
            ((-1,), (-1,), ()),
            ((0,), (1,), ()),
            ((-2,), (1,), ()),
            ((-1,), (1,), (Q, Q)),
            ((-1,), (1, 2), ()),
            ((-1,), (1,), (Distribution((1, 9), (0.99, 0.01)),)),
        ],
    )
    def test_what_no_honest_draft_sends(
        self, parents: tuple[int, ...], tokens: tuple[int, ...], drawn: tuple[Distribution, ...]
    ) -> None:
        p = torch.full((1 + len(tokens), 4), 0.01)
        p[:, 0] = 0.97
        with pytest.raises(ValueError, match=r"block|distribution"):
            judge(parents, tokens, drawn, p, Noise(0, 0))


class TestNoise:
    def test_no_two_streams_share_numbers(self) -> None:
        """Accepting, choosing, drafting, and the noise of coupled acceptance, at neighbouring places."""
        numbers: list[float] = []
        for seed, position in itertools.product((0, 1, 2**63 - 1), (0, 1, 2)):
            noise = Noise(seed, position)
            numbers += [noise.uniform(0, rank) for rank in range(4)]
            for gumbel in (noise.gumbel(0, 8), gumbel_noise(seed, position, 8)):
                numbers += torch.exp(-torch.exp(-gumbel.double())).tolist()
        rounded = [round(number, 6) for number in numbers]
        assert len(set(rounded)) == len(rounded)

    def test_depth_is_position(self) -> None:
        assert Noise(5, 10).uniform(3, 1) == Noise(5, 13).uniform(0, 1)
        assert torch.equal(Noise(5, 10).gumbel(3, 9), Noise(5, 13).gumbel(0, 9))

    def test_drawing_is_from_the_distribution_without_replacement(self) -> None:
        q = Distribution((7, 8, 9), (0.5, 0.5, 0.0))
        found = Counter(draw(q, 3, seed=seed, position=4) for seed in range(1000))
        assert set(found) == {(7, 8), (8, 7)}
        assert found[7, 8] == pytest.approx(500, abs=70)


class TestNamed:
    """What a distribution may be."""

    @pytest.mark.parametrize(
        ("tokens", "probabilities"),
        [
            ((), ()),
            ((1,), (0.5, 0.5)),
            ((1, 1), (0.5, 0.5)),
            ((-1,), (1.0,)),
            ((1, 2), (1.5, -0.5)),
            ((1, 2), (0.5, 0.4)),
            ((1,), (math.nan,)),
            ((1,), (math.inf,)),
        ],
    )
    def test_what_is_none(self, tokens: tuple[int, ...], probabilities: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="distribution"):
            Distribution(tokens, probabilities)

    def test_rounding_is_allowed_for(self) -> None:
        assert len(Distribution((1, 2, 3), (0.3333, 0.3333, 0.3333))) == 3
