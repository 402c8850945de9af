"""A stage over a token tree gives what a full recompute of each node's path gives."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aparte.errors import SlotError
from aparte.model.parts import Blueprint, Embedding
from aparte.model.stage import Stage
from aparte.step import ROOT, Step, chain_parents
from random_steps import Model, draw_step
from running import FLOAT32
from tiny import FAMILIES


@functools.cache
def loaded(folder: Path) -> tuple[Blueprint, Stage, Embedding]:
    blueprint = Blueprint.open(folder, FLOAT32)
    embed, _ = blueprint.ends()
    return blueprint, blueprint.stage(range(blueprint.layers)), embed


def recompute(stage: Stage, embed: Embedding, tokens: list[int]) -> torch.Tensor:
    """The last hidden state of ``tokens`` from an empty cache."""
    step = Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, len(tokens)))
    return stage.forward(stage.new_cache(), step, embed(torch.tensor(tokens)))[-1]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_trees_equal_a_full_recompute(
    tiny_folders: dict[str, Path], name: str, data: st.DataObject
) -> None:
    _, stage, embed = loaded(tiny_folders[name])
    cache, model = stage.new_cache(), Model()
    for number in range(data.draw(st.integers(2, 7), label="steps")):
        step, tokens = draw_step(data, model, number)
        hidden = stage.forward(cache, step, embed(torch.tensor(tokens)))
        cache.check_integrity()
        assert cache.tree.rows == len(model.parent)
        for offset in range(len(tokens)):
            path = [model.token[slot] for slot in model.path(step.base + offset)]
            torch.testing.assert_close(hidden[offset], recompute(stage, embed, path), atol=2e-4, rtol=1e-4)


def test_a_step_sent_twice_means_the_same(llama_folder: Path) -> None:
    _, stage, embed = loaded(llama_folder)
    cache = stage.new_cache()
    prompt = Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, 5))
    stage.forward(cache, prompt, embed(torch.tensor([1, 2, 3, 4, 5])))
    tree = Step(2, 0, 4, 5, (4, 5, 5, 6))
    tokens = embed(torch.tensor([6, 7, 8, 9]))
    first = stage.forward(cache, tree, tokens)
    again = stage.forward(cache, tree, tokens)
    assert torch.equal(first, again)
    assert cache.tree.rows == 9


def test_rejected_nodes_leave_no_trace(llama_folder: Path) -> None:
    """The cache after a rejected branch equals the cache that never saw it, bit for bit."""
    _, stage, embed = loaded(llama_folder)
    with_branch, without = stage.new_cache(), stage.new_cache()
    prompt = Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, 4))
    for cache in (with_branch, without):
        stage.forward(cache, prompt, embed(torch.tensor([1, 2, 3, 4])))
    stage.forward(with_branch, Step(2, 0, 3, 4, (3, 4, 4)), embed(torch.tensor([9, 8, 7])))
    end = Step(3, 0, 3, 4, (3,))
    left = stage.forward(with_branch, end, embed(torch.tensor([5])))
    right = stage.forward(without, end, embed(torch.tensor([5])))
    assert torch.equal(left, right)
    assert with_branch.tree.slots == without.tree.slots


def test_an_accepted_branch_is_compacted(llama_folder: Path) -> None:
    _, stage, embed = loaded(llama_folder)
    cache = stage.new_cache()
    stage.forward(cache, Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, 3)), embed(torch.tensor([1, 2, 3])))
    # Two branches below the tip; the second one is accepted.
    stage.forward(cache, Step(2, 0, 2, 3, (2, 3, 2, 5)), embed(torch.tensor([10, 11, 20, 21])))
    hidden = stage.forward(cache, Step(3, 0, 6, 7, (6,)), embed(torch.tensor([30])))
    assert cache.tree.slots == (0, 1, 2, 5, 6, 7)
    torch.testing.assert_close(
        hidden[0], recompute(stage, embed, [1, 2, 3, 20, 21, 30]), atol=1e-4, rtol=1e-4
    )


def test_the_cache_grows_and_keeps_what_it_holds(llama_folder: Path) -> None:
    _, stage, embed = loaded(llama_folder)
    cache = stage.new_cache()
    tokens = [(7 * i) % 250 for i in range(600)]
    hidden = None
    for start in range(0, 600, 100):
        step = Step(start, 0, start - 1, start, chain_parents(start - 1, start, 100))
        hidden = stage.forward(cache, step, embed(torch.tensor(tokens[start : start + 100])))
    assert hidden is not None
    torch.testing.assert_close(hidden[-1], recompute(stage, embed, tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (Step(2, 0, 7, 9, (7,)), "does not hold"),
        (Step(2, 0, 1, 4, (0,)), "neither the committed tip"),
        (Step(2, 0, 2, 30, (17,)), "neither the committed tip"),
    ],
)
def test_unknown_slots_are_refused_and_change_nothing(llama_folder: Path, step: Step, cause: str) -> None:
    _, stage, embed = loaded(llama_folder)
    cache = stage.new_cache()
    stage.forward(cache, Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, 3)), embed(torch.tensor([1, 2, 3])))
    with pytest.raises(SlotError, match=cause):
        stage.forward(cache, step, embed(torch.tensor([4])))
    assert cache.tree.slots == (0, 1, 2)
    cache.check_integrity()


def test_a_stage_refuses_more_than_its_context(llama_folder: Path) -> None:
    blueprint, stage, embed = loaded(llama_folder)
    cache = stage.new_cache(max_pending=4)
    length = blueprint.max_context
    with pytest.raises(SlotError, match="outgrow"):
        stage.forward(
            cache,
            Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, length + 5)),
            embed(torch.zeros(length + 5, dtype=torch.long)),
        )
