"""The fast path gives the results of the simple one: to the bit where it says so, else within rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from aparte.config import Compute
from aparte.model.fuse import FastNorm, FusedGated, Part, Together, fast_norm, fuse
from aparte.model.layer import FastLayer
from aparte.model.linear import PackedLinear, bf16_available, pack_linears, packed_available
from aparte.model.parts import Blueprint
from aparte.model.stage import Stage
from aparte.step import ROOT, Step, chain_parents
from tiny import FAMILIES, tiny_model

CPU = Compute("float32", "cpu")
PACKED = Compute("packed16", "cpu")
BF16 = Compute("bfloat16", "cpu")
needs_packed = pytest.mark.skipif(
    not packed_available(), reason="this CPU has no packed half-precision kernels"
)
needs_bf16 = pytest.mark.skipif(not bf16_available(), reason="this CPU has no kernels for bfloat16")
COMPUTES = [CPU, pytest.param(PACKED, marks=needs_packed), pytest.param(BF16, marks=needs_bf16)]

PROMPT = list(range(40, 60))  # longer than the tiny sliding window
TREE = (19, 20, 20, 22, 21, 19)


def hidden_states(stage: Stage, inputs: torch.Tensor) -> torch.Tensor:
    """Of a prompt, then a tree below it, then one node below a leaf of that; ``[n, D]``."""
    cache, length = stage.new_cache(), len(PROMPT)
    steps = (
        Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, length)),
        Step(2, 0, length - 1, length, TREE),
        Step(3, 0, 23, 26, (23,)),
    )
    outputs, at = [], 0
    for step in steps:
        outputs.append(stage.forward(cache, step, inputs[at : at + len(step)]))
        at += len(step)
    return torch.cat(outputs)


def count(stage: Stage, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in stage._layers.modules())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("compute", COMPUTES, ids=lambda c: c.dtype)
def test_fast_and_simple_agree(tiny_folders: dict[str, Path], name: str, compute: Compute) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(len(PROMPT) + len(TREE) + 1, 32)
    fast, simple, exact = (
        Blueprint.open(tiny_folders[name], how, fused=fused).stage(range(6))
        for how, fused in ((compute, True), (compute, False), (CPU, False))
    )
    got, expected = hidden_states(fast, inputs).float(), hidden_states(simple, inputs).float()
    if compute is BF16:  # which rounds here and there: neither is nearer to what is right
        right = hidden_states(exact, inputs)
        assert float((got - right).norm()) < 1.1 * float((expected - right).norm())
    else:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    # Every family has what is replaced; were it renamed, nothing else would notice.
    norms = 6 * (4 if name == "qwen3" else 2)
    assert (count(fast, FastNorm), count(simple, FastNorm)) == (norms, 0)
    joined = 0 if compute is CPU else 6
    whole = joined if name != "qwen3" else 0  # which norms queries and keys
    assert count(fast, FastLayer) == whole
    assert (count(fast, Part), count(fast, FusedGated)) == (3 * (joined - whole), joined)
    assert (count(simple, Part), count(simple, FusedGated), count(simple, FastLayer)) == (0, 0, 0)
    implementations = {
        layer.self_attn.config._attn_implementation  # type: ignore[union-attr]
        for layer in fast._layers
        if hasattr(layer, "self_attn")
    }
    assert implementations == (set() if whole else {"aparte"})


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_stock_model(tiny_folders: dict[str, Path], name: str) -> None:
    blueprint = Blueprint.open(tiny_folders[name], CPU)
    stage, (embed, head) = blueprint.stage(range(6)), blueprint.ends()
    step = Step(1, 0, ROOT, 0, chain_parents(ROOT, 0, len(PROMPT)))
    logits = head(stage.forward(stage.new_cache(), step, embed(torch.tensor(PROMPT))))
    with torch.inference_mode():
        expected = tiny_model(name)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_skeleton_gives_the_same_stage_twice(llama_folder: Path) -> None:
    blueprint = Blueprint.open(llama_folder, CPU)
    inputs = torch.randn(len(PROMPT) + len(TREE) + 1, 32)
    first, second = (hidden_states(blueprint.stage(range(6)), inputs) for _ in range(2))
    assert torch.equal(first, second)


class TestTogether:
    pytestmark = needs_packed

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("rows", [1, 5, 8])
    def test_is_exact_to_the_bit(self, bias: bool, rows: int) -> None:
        linears = [nn.Linear(96, width, bias=bias) for width in (48, 16, 16)]
        together = Together(linears, "packed16")
        x = torch.randn(1, rows, 96)
        for index, linear in enumerate(linears):
            packed = PackedLinear(linear.weight, linear.bias)
            assert torch.equal(together.part(x, index), packed(x))
        assert together._newest is None

    def test_calls_that_interleave(self) -> None:
        """As from two threads in one layer: nobody gets the other's numbers."""
        together = Together([nn.Linear(32, 8), nn.Linear(32, 8)], "packed16")
        left, right = torch.randn(1, 2, 32), torch.randn(1, 3, 32)
        expected = [[together.part(x, index) for index in range(2)] for x in (left, right)]
        mixed = [
            together.part(left, 0),
            together.part(right, 0),
            together.part(left, 1),
            together.part(right, 1),
        ]
        for got, want in zip(
            mixed, (expected[0][0], expected[1][0], expected[0][1], expected[1][1]), strict=True
        ):
            assert torch.equal(got, want)

    def test_linears_that_are_not_alike_stay(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
                self.v_proj = nn.Linear(8, 8, bias=False)

        block = Block()
        fuse(block, "packed16")
        assert not any(isinstance(module, Part) for module in block.modules())


class TestFusedGated:
    pytestmark = needs_packed

    class Block(nn.Module):
        def __init__(self, act: nn.Module, *, swapped: bool = False) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(32, 64), nn.Linear(32, 64)
            self.down_proj, self.act_fn = nn.Linear(64, 32), act
            self.swapped = swapped

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = self.gate_proj(x), self.up_proj(x)
            if self.swapped:
                left, right = right, left
            result: torch.Tensor = self.down_proj(self.act_fn(left) * right)
            return result

    @pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh")])
    def test_is_exact_to_the_bit(self, act: nn.Module) -> None:
        block, x = self.Block(act), torch.randn(1, 5, 32)
        plain = copy.deepcopy(block)
        holder = nn.ModuleList([block])
        fuse(holder, "packed16")
        assert isinstance(holder[0], FusedGated)
        pack_linears(plain)
        assert torch.equal(holder[0](x), plain(x))

    def test_one_that_only_looks_alike_stays(self) -> None:
        holder = nn.ModuleList([self.Block(nn.SiLU(), swapped=True)])
        fuse(holder, "packed16")
        assert isinstance(holder[0], self.Block)


class TestFastNorm:
    def norm(self, forward: str) -> nn.Module:
        class Norm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.rand(64) + 0.5, requires_grad=False)
                self.variance_epsilon = 1e-5

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
                return x * (1 + self.weight if forward == "one plus" else self.weight)

        return Norm()

    @pytest.mark.parametrize("scale", [1e-8, 1e-3, 1.0, 1e4])
    def test_is_the_same_norm(self, scale: float) -> None:
        slow = self.norm("plain")
        fast = fast_norm(slow)
        assert isinstance(fast, FastNorm)
        x = torch.randn(1, 7, 64) * scale
        torch.testing.assert_close(fast(x), slow(x), atol=1e-6, rtol=2e-6)

    def test_one_that_only_looks_alike_stays(self) -> None:
        norm = self.norm("one plus")
        assert fast_norm(norm) is norm

    def test_in_bfloat16_it_rounds_once(self) -> None:
        slow = self.norm("plain").to(torch.bfloat16)
        fast, exact = fast_norm(slow), copy.deepcopy(slow).float()
        assert isinstance(fast, FastNorm)
        x = torch.randn(1, 7, 64).bfloat16()
        assert torch.equal(fast(x), exact(x.float()).bfloat16())

    def test_float16_stays(self) -> None:
        norm = self.norm("plain").to(torch.float16)
        assert fast_norm(norm) is norm
