"""Trials of kernels, against what linears and attention give for other numbers."""

from __future__ import annotations

import pytest
import torch

from aparte.model import alike
from aparte.model.alike import ALIKE, BLOCK, block_rows, queries_alike
from aparte.model.invariant import FixedRows, fixed_rows
from aparte.model.linear import Bfloat16Linear, PackedLinear, bf16_available, packed_available


def make(kind: type[torch.nn.Module], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    if kind is not torch.nn.Linear:
        return kind(weight, bias)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


class Uneven(PackedLinear):
    """Below so many rows it gives something else; and something else at every place, if told so."""

    until = 1
    by_place = False
    #: Places that far apart are alike.
    place = 2

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.rows = len(weight)
        self.biased = bias is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.full((len(x), self.out_features), float(min(len(x), self.until)))
        return result + torch.arange(len(x))[:, None] % self.place if self.by_place else result


@pytest.mark.parametrize(
    "kind",
    [
        torch.nn.Linear,
        *([PackedLinear] if packed_available() else []),
        *([Bfloat16Linear] if bf16_available() else []),
    ],
)
@pytest.mark.parametrize("shape", [(64, 32), (96, 576), (33, 40)])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_what_the_trial_says(
    kind: type[torch.nn.Module], shape: tuple[int, int], biased: bool
) -> None:
    weight = torch.randn(shape[0], shape[1] // 2)
    # Numbers whose products cancel, so that every order of adding them up shows.
    linear = make(kind, torch.cat([weight, -weight], dim=1), torch.randn(shape[0]) if biased else None)
    fixed = fixed_rows(linear)
    assert isinstance(fixed, FixedRows)
    assert (fixed.least, fixed.most) == block_rows(linear)
    assert 1 <= fixed.least <= fixed.most <= ALIKE
    half = torch.randn(3 * ALIKE, shape[1] // 2)
    x = torch.cat([half, half], dim=1).to(getattr(kind, "takes", torch.float32))
    whole = fixed(x)
    for count in (1, 2, 3, 5, 8, 13, 16, 17, ALIKE, ALIKE + 1, 2 * ALIKE + 5):
        assert torch.equal(fixed(x[:count]), whole[:count])
        assert torch.equal(fixed(x[-count:]), whole[-count:])


@pytest.mark.parametrize("until", [1, 3, ALIKE // 2, ALIKE // 2 + 1])
def test_a_kernel_that_looks_at_the_number_of_rows(monkeypatch: pytest.MonkeyPatch, until: int) -> None:
    monkeypatch.setattr(Uneven, "until", until)
    alike._packed.cache_clear()
    expected = (until, ALIKE) if until <= ALIKE // 2 else (BLOCK, BLOCK)
    assert block_rows(Uneven(torch.zeros(5, 8), None)) == expected


def test_a_kernel_that_looks_at_the_place_gets_row_after_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uneven, "by_place", True)
    alike._packed.cache_clear()
    linear = Uneven(torch.zeros(5, 8), None)
    assert block_rows(linear) == (1, 1)
    assert torch.equal(fixed_rows(linear)(torch.zeros(3, 8)), torch.ones(3, 5))


def test_a_large_matrix_is_tried_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go by its real size, as for an LM head, and no copy of it is made."""
    monkeypatch.setattr(alike, "MOST_NUMBERS", 64 * 32 - 1)
    monkeypatch.setattr(alike, "_plain", None)
    linear = torch.nn.Linear(32, 64)
    asked: list[int] = []
    forward = linear.forward
    monkeypatch.setattr(linear, "forward", lambda x: (asked.append(len(x)), forward(x))[1])
    least, most = block_rows(linear)
    assert ALIKE in asked
    count = len(asked)
    assert block_rows(linear) == (least, most)
    assert len(asked) == count


def test_heads_of_blocks_are_tried_in_their_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear in parts gets blocks that suit the last of them, too."""

    class Last(Uneven):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((len(x), self.out_features), float(self.out_features == 3 and len(x) == 1))

    linear = Last(torch.zeros(8, 4), None)
    linear.rows = 5
    assert block_rows(linear) == (2, ALIKE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_in_one_place_are_those_in_another(dtype: torch.dtype) -> None:
    """Whatever this processor does, a trial comes to an end, and to the same one."""
    first = queries_alike(16, dtype, 32, torch.get_num_threads())
    queries_alike.cache_clear()
    assert queries_alike(16, dtype, 32, torch.get_num_threads()) is first


def test_queries_that_are_not_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = alike.weighted

    def by_place(query: torch.Tensor, *more: object) -> tuple[torch.Tensor, torch.Tensor]:
        result, weights = right(query, *more)  # type: ignore[arg-type]
        result[:, :, -1] += 1
        return result, weights

    queries_alike.cache_clear()
    monkeypatch.setattr(alike, "weighted", by_place)
    assert not queries_alike(16, torch.float32, 32, torch.get_num_threads())
    queries_alike.cache_clear()
