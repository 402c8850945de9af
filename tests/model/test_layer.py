"""A layer in few operations is one that computes the same, or it is not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from aparte.config import Compute
from aparte.model.layer import FastLayer, fast_layer
from aparte.model.linear import bf16_available, packed_available
from aparte.model.parts import Blueprint, convert

pytestmark = pytest.mark.skipif(
    not packed_available(), reason="this CPU has no packed half-precision kernels"
)


needs_bf16 = pytest.mark.skipif(not bf16_available(), reason="this CPU has no kernels for bfloat16")


@pytest.fixture(params=["packed16", pytest.param("bfloat16", marks=needs_bf16)])
def blueprint(request: pytest.FixtureRequest, llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, Compute(request.param, "cpu"))


def plain_layer(blueprint: Blueprint, index: int = 2) -> nn.Module:
    """A layer of the library whose parts are fused."""
    layer = blueprint.empty_layer(index)
    blueprint._fill(layer, f"model.layers.{index}.")
    return layer


def rotary(blueprint: Blueprint) -> nn.Module:
    return blueprint.stage(range(1))._rotary


def test_a_plain_layer_is_taken(blueprint: Blueprint) -> None:
    assert isinstance(fast_layer(plain_layer(blueprint), rotary(blueprint)), FastLayer)


def other_order(layer: nn.Module) -> None:
    original = layer.forward
    layer.forward = lambda states, **more: original(states.flip(-1), **more)  # type: ignore[method-assign]


def one_more_norm(layer: nn.Module) -> None:
    layer.self_attn.q_norm = nn.Identity()  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [other_order, one_more_norm])
def test_a_layer_that_does_something_else_stays(
    blueprint: Blueprint, change: Callable[[nn.Module], None]
) -> None:
    layer = plain_layer(blueprint)
    change(layer)
    assert fast_layer(layer, rotary(blueprint)) is layer


def test_layers_that_are_not_packed_stay(llama_folder: Path) -> None:
    blueprint = Blueprint.open(llama_folder, Compute("float32", "cpu"))
    layer = plain_layer(blueprint)
    convert(layer, blueprint.precision, fused=True)
    assert fast_layer(layer, rotary(blueprint)) is layer
