"""Sessions that share a forward pass get what each would get alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aparte.config import Compute
from aparte.errors import SlotError
from aparte.model.linear import packed_available
from aparte.model.parts import Blueprint
from aparte.model.stage import Item, Output, Stage
from aparte.step import ROOT, Step, chain_parents
from random_steps import Model, draw_step
from running import FLOAT32
from tiny import FAMILIES

WIDTH = 32


def opened(folder: Path, kind: str) -> Stage:
    compute = Compute("packed16", "cpu") if kind == "packed16" else FLOAT32
    return Blueprint.open(folder, compute, fused=kind != "stock").stage(range(6))


def states(nodes: int, seed: int) -> torch.Tensor:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(seed))


def links(tip: int, base: int, count: int) -> Step:
    return Step(1, 0, tip, base, chain_parents(tip, base, count))


def hidden_of(output: Output | Exception) -> torch.Tensor:
    assert isinstance(output, Output), output
    return output.hidden


needs_packed = pytest.mark.skipif(not packed_available(), reason="this CPU has no packed kernels")


@pytest.mark.parametrize("kind", ["float32", pytest.param("packed16", marks=needs_packed), "stock"])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_sessions_in_random_company_are_as_if_alone(
    tiny_folders: dict[str, Path], name: str, kind: str, data: st.DataObject
) -> None:
    """Trees, prefills, rollbacks and single nodes of several sessions, in passes of any composition."""
    stage = opened(tiny_folders[name], kind)
    assert stage.shares_passes
    sessions = [(Model(), stage.new_cache(), stage.new_cache()) for _ in range(4)]
    for number in range(data.draw(st.integers(2, 5), label="passes")):
        present = data.draw(
            st.lists(st.sampled_from(range(4)), min_size=1, max_size=4, unique=True), label="present"
        )
        together: list[Item] = []
        alone: list[torch.Tensor] = []
        for session in present:
            model, shared_cache, own_cache = sessions[session]
            step, _ = draw_step(data, model, number)
            hidden = states(len(step), 10 * number + session)
            together.append(Item(shared_cache, step, hidden))
            alone.append(stage.forward(own_cache, step, hidden))
        outputs = stage.forward_many(together)
        for item, output, expected in zip(together, outputs, alone, strict=True):
            item.cache.check_integrity()
            torch.testing.assert_close(hidden_of(output), expected, atol=1e-4, rtol=1e-4)


def test_the_output_of_a_layer_on_the_way_can_be_had_too(llama_folder: Path) -> None:
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    whole, lower = blueprint.stage(range(1, 6)), blueprint.stage(range(1, 4))
    first, second = states(3, 1), states(5, 2)
    outputs = whole.forward_many(
        [
            Item(whole.new_cache(), links(ROOT, 0, 3), first, tap=3),
            Item(whole.new_cache(), links(ROOT, 0, 5), second),
            Item(whole.new_cache(), links(ROOT, 0, 5), second, tap=5),
        ]
    )
    alone = whole.forward_one(Item(whole.new_cache(), links(ROOT, 0, 3), first, tap=3))
    assert isinstance(outputs[0], Output)
    assert isinstance(outputs[1], Output)
    assert isinstance(outputs[2], Output)
    expected = lower.forward(lower.new_cache(), links(ROOT, 0, 3), first)
    assert outputs[0].tapped is not None
    assert alone.tapped is not None
    torch.testing.assert_close(outputs[0].tapped, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone.tapped, expected, atol=1e-5, rtol=1e-5)
    assert outputs[1].tapped is None
    assert outputs[2].tapped is not None
    assert torch.equal(outputs[2].tapped, outputs[2].hidden)


@pytest.mark.parametrize("tap", [0, 6])
def test_a_layer_that_is_not_here_cannot_be_tapped(llama_folder: Path, tap: int) -> None:
    stage = Blueprint.open(llama_folder, FLOAT32).stage(range(1, 6))
    with pytest.raises(SlotError, match="not among those of this stage"):
        stage.forward_one(Item(stage.new_cache(), links(ROOT, 0, 1), states(1, 0), tap))


def test_a_step_that_does_not_fit_is_its_own_error_and_changes_nothing(llama_folder: Path) -> None:
    stage = opened(llama_folder, "float32")
    bad, good, alone = stage.new_cache(), stage.new_cache(), stage.new_cache()
    stage.forward(bad, links(ROOT, 0, 2), states(2, 0))
    outputs = stage.forward_many(
        [
            Item(bad, links(77, 78, 1), states(1, 1)),
            Item(good, links(ROOT, 0, 4), states(4, 2)),
            Item(bad, Step(1, 0, 1, 2, (0,)), states(1, 3)),
        ]
    )
    assert isinstance(outputs[0], SlotError)
    assert isinstance(outputs[2], SlotError)
    assert bad.tree.slots == (0, 1)
    expected = stage.forward(alone, links(ROOT, 0, 4), states(4, 2))
    torch.testing.assert_close(hidden_of(outputs[1]), expected, atol=1e-5, rtol=1e-5)


def test_nothing_is_computed_if_nothing_fits(llama_folder: Path) -> None:
    stage = opened(llama_folder, "float32")
    outputs = stage.forward_many([Item(stage.new_cache(), links(5, 6, 1), states(1, i)) for i in range(2)])
    assert [type(output) for output in outputs] == [SlotError, SlotError]


def test_one_sessions_monstrous_numbers_stay_its_own(llama_folder: Path) -> None:
    stage = opened(llama_folder, "float32")
    good, alone = stage.new_cache(), stage.new_cache()
    for step, nodes in ((links(ROOT, 0, 3), 3), (links(2, 3, 1), 1)):
        bad = Item(stage.new_cache(), links(ROOT, 0, 2), torch.full((2, WIDTH), float("inf")))
        outputs = stage.forward_many([bad, Item(good, step, states(nodes, nodes))])
        assert not torch.isfinite(hidden_of(outputs[0])).all()
        expected = stage.forward(alone, step, states(nodes, nodes))
        torch.testing.assert_close(hidden_of(outputs[1]), expected, atol=1e-5, rtol=1e-5)


def test_layers_with_attention_of_their_own_share_nothing(llama_folder: Path) -> None:
    stage = opened(llama_folder, "stock")
    assert stage.shares_passes
    layers = stage._layers
    layers[2].self_attn.config._attn_implementation = "eager"  # type: ignore[union-attr]
    other = Stage(
        layers,
        stage._rotary,
        first_layer=0,
        windows=(None,) * 6,
        max_context=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert not other.shares_passes
