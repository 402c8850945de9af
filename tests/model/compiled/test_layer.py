"""Compiled layers compute what the others do, node by node the same bits, or they are not used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aparte.config import Compute, KvName
from aparte.model import compiled as compiled_package
from aparte.model.layer import FastLayer
from aparte.model.linear import Int8Linear, packed_available
from aparte.model.parts import Blueprint
from aparte.model.stage import Item, Stage
from aparte.step import ROOT, Step, chain_parents

module = pytest.importorskip("aparte.model.compiled.layer", reason="Numba is not installed")
pytestmark = pytest.mark.skipif(not packed_available(), reason="this CPU has no packed kernels")

TREE = (-1, 0, 0, 1, 2)


@pytest.fixture(params=["packed16", "int8"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def load(
    folder: Path, dtype: Any, kv: KvName = "model", *, compiled: bool = True, invariant: bool = False
) -> Stage:
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(compiled_package, "available", lambda: False)
        stage = Blueprint.open(folder, Compute(dtype, "cpu", kv=kv, batch_invariant=invariant)).stage(
            range(3)
        )
    kind = module.CompiledLayer if compiled else FastLayer
    assert all(isinstance(layer, kind) for layer in stage._layers)
    return stage


def states(stage: Stage, nodes: int) -> torch.Tensor:
    width = stage._layers[0].get_submodule("_plain")._before._weight.shape[0]  # type: ignore[union-attr,index]
    return torch.randn(nodes, width, generator=torch.Generator().manual_seed(nodes))


def steps(prefix: int) -> Iterator[tuple[Step, slice]]:
    """A prefix, a tree below it, then another tree below the third node of that."""
    yield Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, prefix)), slice(0, prefix)
    for number, tip in enumerate((prefix - 1, prefix + 2)):
        base = prefix + number * len(TREE)
        parents = tuple(tip if parent < 0 else base + parent for parent in TREE)
        yield Step(number + 1, 0, tip, base, parents), slice(base, base + len(TREE))


def outputs(stage: Stage, hidden: torch.Tensor, prefix: int) -> list[torch.Tensor]:
    cache = stage.new_cache()
    return [stage.forward(cache, step, hidden[of]) for step, of in steps(prefix)]


@pytest.mark.parametrize("kv", ["model", "int8", "float16", "float8"])
@pytest.mark.parametrize("prefix", [1, 70])
def test_a_stage_computes_the_same(llama_folder: Path, dtype: Any, prefix: int, kv: KvName) -> None:
    compiled, plain = load(llama_folder, dtype, kv), load(llama_folder, dtype, kv, compiled=False)
    hidden = states(compiled, prefix + 2 * len(TREE))
    for got, expected in zip(outputs(compiled, hidden, prefix), outputs(plain, hidden, prefix), strict=True):
        # The last bit of a float may tip an 8-bit number.
        near = 2e-5 if dtype == "packed16" and kv == "model" else 0.03
        torch.testing.assert_close(got, expected, atol=near * float(expected.abs().max()), rtol=0)


def test_a_node_of_a_tree_has_the_bits_of_a_sequence(llama_folder: Path) -> None:
    """Sums of integers are exact, and all the rest goes row by row and path by path."""
    for kv in ("model", "int8"):
        stage = load(llama_folder, "int8", kv)  # type: ignore[arg-type]
        prefix = 9
        hidden = states(stage, prefix + len(TREE))
        cache = stage.new_cache()
        (start, of), (tree, nodes), *_ = steps(prefix)
        stage.forward(cache, start, hidden[of])
        together = stage.forward(cache, tree, hidden[nodes])
        for path in ((0, 1, 3), (0, 2, 4)):
            cache = stage.new_cache()
            stage.forward(cache, start, hidden[of])
            for depth, node in enumerate(path):
                tip = prefix + depth - 1
                alone = stage.forward(
                    cache, Step(depth + 1, 0, tip, tip + 1, (tip,)), hidden[prefix + node][None]
                )
                assert torch.equal(alone[0], together[node])


def test_invariant_steps_walk_whatever_their_size(
    llama_folder: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load(llama_folder, dtype, invariant=True)
    monkeypatch.setattr(module, "shared_heads", None)
    hidden = states(stage, 70)
    whole = stage.forward(stage.new_cache(), Step(0, 0, ROOT, 0, chain_parents(ROOT, 0, 70)), hidden)
    cache = stage.new_cache()
    for slot in range(70):
        one = stage.forward(cache, Step(slot, 0, slot - 1, slot, (slot - 1,)), hidden[slot][None])
        assert torch.equal(one[0], whole[slot])


def test_sessions_in_one_pass_are_as_if_alone(llama_folder: Path, dtype: Any) -> None:
    stage = load(llama_folder, dtype, "int8" if dtype == "int8" else "model")
    prefixes = (4, 70)
    hidden = [states(stage, prefix + len(TREE)) for prefix in prefixes]
    plans = [list(steps(prefix))[:2] for prefix in prefixes]
    alone = []
    for plan, rows in zip(plans, hidden, strict=True):
        cache = stage.new_cache()
        alone.append([stage.forward(cache, step, rows[of]) for step, of in plan])
    caches = [stage.new_cache() for _ in prefixes]
    for turn in range(2):
        items = [
            Item(cache, plan[turn][0], rows[plan[turn][1]])
            for cache, plan, rows in zip(caches, plans, hidden, strict=True)
        ]
        for output, expected in zip(stage.forward_many(items), alone, strict=True):
            assert not isinstance(output, Exception)
            torch.testing.assert_close(output.hidden, expected[turn], atol=1e-6, rtol=1e-6)
            if dtype == "int8":
                assert torch.equal(output.hidden, expected[turn])


def test_steps_of_many_nodes_leave_attention_to_the_library(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load(llama_folder, "int8")
    hidden = states(stage, 90)
    walked: list[int] = []
    walk_of = module.walk_of
    monkeypatch.setattr(
        module, "walk_of", lambda paths, *shape: walked.append(len(paths.rows)) or walk_of(paths, *shape)
    )
    outputs(stage, hidden, 80)
    assert walked == [len(TREE)] * 2 * 3


def gelu(layer: FastLayer) -> None:
    layer._feed._act = nn.GELU()


def biased(layer: FastLayer) -> None:
    linear = layer._leave
    assert isinstance(linear, Int8Linear)
    linear.bias = torch.ones(linear.out_features)


def other_norm(layer: FastLayer) -> None:
    layer._before = nn.LayerNorm(8)


def other_linear(layer: FastLayer) -> None:
    layer._leave = nn.Linear(8, 8)


@pytest.mark.parametrize("change", [gelu, biased, other_norm, other_linear])
def test_a_layer_of_another_kind_stays(llama_folder: Path, change: Any) -> None:
    stage = load(llama_folder, "int8", compiled=False)
    change(stage._layers[1])
    layers = list(stage._layers)
    assert module.replaced(layers, stage._rotary) == layers


def test_a_layer_that_computes_something_else_stays(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load(llama_folder, "int8", compiled=False)
    layers = list(stage._layers)
    for wrong in (False, True):
        # Once by masks and once by paths.
        monkeypatch.setattr(module, "same_results", lambda *_, by_paths, wrong=wrong: by_paths != wrong)
        assert module.replaced(layers, stage._rotary) == layers


def test_rooms_of_large_steps_are_not_kept(llama_folder: Path) -> None:
    layer = load(llama_folder, "int8")._layers[0]
    assert module._rooms(3, layer) is module._rooms(3, layer)
    assert module._rooms(65, layer) is not module._rooms(65, layer)


def test_without_a_working_compiler_layers_are_as_they_are(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("LLVM knows no such processor")

    monkeypatch.setattr(module, "replaced", fails)
    stage = Blueprint.open(llama_folder, Compute("int8", "cpu")).stage(range(2))
    assert all(isinstance(layer, FastLayer) for layer in stage._layers)
    assert "Layers are not compiled" in caplog.text


def test_a_compiler_that_cannot_be_loaded_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when NumPy is newer than what Numba knows."""
    monkeypatch.setitem(sys.modules, "aparte.model.compiled.layer", None)
    monkeypatch.delattr(compiled_package, "layer")
    assert not compiled_package.available.__wrapped__()
    assert "Layers are not compiled" in caplog.text
    monkeypatch.setattr(compiled_package, "find_spec", lambda name: None)
    assert not compiled_package.available.__wrapped__()


@pytest.mark.parametrize("there", [True, False])
def test_the_first_compilation_is_announced(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(compiled_package, "available", lambda: there)
    monkeypatch.setattr(compiled_package, "find_spec", lambda name: True if there else None)
    monkeypatch.delitem(sys.modules, "aparte.model.compiled.layer")
    shown: list[str] = []
    blueprint = Blueprint.open(llama_folder, Compute("int8", "cpu"))
    blueprint.stage(range(2), lambda label, *_: shown.append(label))
    assert ("kernels" in shown) == there
