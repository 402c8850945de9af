"""The parallel unrolls of training are what drafting does step by step."""

from __future__ import annotations

import pytest
import torch

from aparte.bridge.corpus import Shard
from aparte.bridge.teacher import Teacher
from aparte.bridge.unroll import unroll
from bridge.conftest import new_net


def test_a_perfect_guess_gives_the_true_output_at_every_depth(
    teacher: Teacher, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = new_net(teacher)
    middle = shard.middle.float()
    monkeypatch.setattr(net, "exit", lambda hidden: middle)
    true = next(iter(unroll(net, teacher, shard.front.float(), middle, 1))).final
    for guess in unroll(net, teacher, shard.front.float(), middle, 3):
        assert torch.allclose(guess.final, true, atol=1e-4)
        assert torch.allclose(guess.final, shard.final.float(), rtol=0.05, atol=0.05)


def test_a_guess_depends_on_the_true_states_before_drafting_began_only(
    teacher: Teacher, shard: Shard
) -> None:
    """Changing the true middle at position s must not change guesses of depth j at t <= s + j - 1."""
    net = new_net(teacher)
    front, middle = shard.front.float(), shard.middle.float()
    changed = middle.clone()
    s = 20
    changed[:, s] += 1.0
    pairs = zip(unroll(net, teacher, front, middle, 3), unroll(net, teacher, front, changed, 3), strict=True)
    for one, other in pairs:
        same = (one.middle - other.middle).abs().amax(dim=(0, 2)) < 1e-6
        assert same[: s + one.depth].all()
        assert not same[s + one.depth]
        final = (one.final - other.final).abs().amax(dim=(0, 2)) < 1e-6
        assert final[: s + one.depth].all()
        assert not final[s + one.depth]


def test_deeper_guesses_feed_on_the_guess_before(teacher: Teacher, shard: Shard) -> None:
    """Gradients flow from depth 3 back through depth 1, one position each."""
    net = new_net(teacher)
    front, middle = shard.front.float(), shard.middle.float()
    guesses = list(unroll(net, teacher, front, middle, 3))
    t = 30
    through = torch.autograd.grad(guesses[2].middle[:, t].sum(), guesses[0].middle)[0]
    touched = (through.abs().amax(dim=(0, 2)) > 0).nonzero().squeeze(1).tolist()
    assert touched == [t - 2]
