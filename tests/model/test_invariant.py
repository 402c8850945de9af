"""``--batch-invariant``: a node's numbers are the same to the bit, whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aparte.config import Compute, Cut
from aparte.device import open_writer
from aparte.errors import UserError
from aparte.measure.verify import Written, write_split
from aparte.model import together
from aparte.model.alike import BLOCK
from aparte.model.invariant import FixedRows, Visible, fix_rows, fixed_rows
from aparte.model.linear import (
    TILE,
    Bfloat16Linear,
    Int8Linear,
    bf16_available,
    packed_available,
)
from aparte.model.parts import Blueprint
from aparte.model.together import TAIL
from aparte.speculate.settings import Decoding
from tiny import save_tiny, tiny_model

DTYPES = ["float32", "bfloat16", "nf4"] + (["packed16", "int8"] if packed_available() else [])


def both(folder: Path, compute: Compute, repeats: int = 1) -> tuple[Written, Written]:
    """The same answer one token per step, and many nodes per step."""
    writer = open_writer(Blueprint.open(folder, compute), "tiny", Cut(1, 2), wire="float32")
    text = " ".join(["the cat sat on the mat and the dog sat on the log and the cat"] * repeats)
    prompt = writer.codec.encode(text)
    modes = (Decoding("sequential"), Decoding("auto", max_nodes=13, in_flight=1))
    assert repeats == 1 or len(prompt) > TAIL, "some of it is older"
    sequential, speculative = (write_split(writer, prompt, mode, 40) for mode in modes)
    return sequential, speculative


@pytest.mark.parametrize(
    ("family", "dtype"), [*(("llama", dtype) for dtype in DTYPES), ("mistral", "bfloat16")]
)
def test_logits_are_equal_to_the_bit(tmp_path: Path, family: str, dtype: str) -> None:
    folder = save_tiny(family, tmp_path)
    sequential, speculative = both(folder, Compute(dtype, "cpu", batch_invariant=True))  # type: ignore[arg-type]
    assert sequential.tokens == speculative.tokens
    assert torch.equal(sequential.logits, speculative.logits)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("mistral", "float32")]
)
def test_so_they_are_in_texts_that_are_cut_in_two(tmp_path: Path, family: str, dtype: str) -> None:
    """Of 128 tokens and more, with and without a sliding window."""
    folder = save_tiny(family, tmp_path)
    sequential, speculative = both(folder, Compute(dtype, "cpu", batch_invariant=True), repeats=6)  # type: ignore[arg-type]
    assert len(sequential.tokens) > 10
    assert sequential.tokens == speculative.tokens
    assert torch.equal(sequential.logits, speculative.logits)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["blocks", "a block each"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a processor's kernels allow it, nodes share blocks. The other way has to work everywhere."""
    if request.param != "blocks":
        monkeypatch.setattr(together, "queries_alike", lambda *_: False)


@pytest.mark.usefixtures("threads", "blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "shared", "size"), [(9, 3, 64), (4, 4, 8), (6, 1, 24), (1, 1, 16)])
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("first", [50, 200, 780])  # from there on, more nodes than go in one call
def test_attention_of_a_node_is_the_same_in_any_tree(
    heads: int, shared: int, size: int, window: int | None, first: int, dtype: torch.dtype
) -> None:
    """A chain of tokens, one at a time, few and many at a time, in a tree with others in between."""
    generator = torch.Generator().manual_seed(heads)
    total = first + 100
    query, key, value = (
        torch.randn(1, count, total, size, generator=generator).to(dtype) for count in (heads, shared, shared)
    )
    places = torch.cat([torch.arange(first), torch.arange(first, first + 2 * (total - first), 2)])
    scattered = [torch.full((1, shared, int(places[-1]) + 1, size), 7.0, dtype=dtype) for _ in "kv"]
    for whole, spread in zip((key, value), scattered, strict=True):
        spread[:, :, places] = whole
    mask = torch.full((total, int(places[-1]) + 1), float("-inf"), dtype=dtype)
    for node in range(total):
        mask[node, places[0 if window is None else max(0, node - window) : node + 1]] = 0

    def attended(nodes: slice) -> torch.Tensor:
        return Visible(mask[nodes]).attend(query[:, :, nodes], *scattered, 0.2)[0]

    at_once = attended(slice(first, total))
    few = [attended(slice(start, start + 20)) for start in range(first, total, 20)]
    assert torch.equal(torch.cat(few), at_once)
    for node in range(first, total):
        past = slice(0 if window is None else max(0, node - window), node + 1)
        row = torch.full((1, node + 1), float("-inf"), dtype=dtype)
        row[:, past] = 0
        seen = [whole[:, :, : node + 1] for whole in (key, value)]
        alone = Visible(row).attend(query[:, :, node : node + 1], *seen, 0.2)
        assert torch.equal(alone[0, 0], at_once[node - first])
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, node : node + 1].float(),
            key[:, :, past].float(),
            value[:, :, past].float(),
            scale=0.2,
            enable_gqa=True,
        )
        near = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
        torch.testing.assert_close(alone[0, 0].float(), expected[0, :, 0], atol=near[0], rtol=near[1])


def test_results_of_a_kernel_may_lie_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the library may leave them so; they are read by row and then by head."""
    query, key, value = (torch.randn(1, count, 200, 8) for count in (6, 2, 2))
    visible = Visible(torch.full((200, 200), float("-inf")).triu(1)[-5:])
    expected = visible.attend(query[:, :, -5:], key, value, 0.3)
    kernel = together.weighted

    def by_head(*given: torch.Tensor | float | None) -> tuple[torch.Tensor, ...]:
        return tuple(whole.contiguous() for whole in kernel(*given))  # type: ignore[arg-type]

    monkeypatch.setattr(together, "weighted", by_head)
    assert torch.equal(visible.attend(query[:, :, -5:], key, value, 0.3), expected)


def test_many_nodes_take_the_memory_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a prompt: what is copied of one group's past makes room for the next group's."""
    taken: list[int] = []
    made = together.Rooms.of

    def counted(rooms: together.Rooms, name: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        room = made(rooms, name, rows, like)
        taken.append(room.data_ptr())
        return room

    monkeypatch.setattr(together.Rooms, "of", counted)
    query, key, value = (torch.randn(1, 2, 320, 8) for _ in "qkv")
    Visible(torch.full((320, 320), float("-inf")).triu(1)).attend(query, key, value, 0.3)
    assert len(taken) >= 3 * 9  # queries, keys and values of so many groups
    assert len(set(taken)) <= 3 * 3  # of three sizes: the first, the last and those in between


def test_numbers_may_lie_anyhow() -> None:
    """Transposed, or with gaps that are no rows: they are copied first, and the results are the same."""
    query, key, value = (torch.randn(1, count, 130, 8) for count in (4, 2, 2))
    visible = Visible(torch.full((130, 130), float("-inf")).triu(1)[-3:])
    nodes = query[:, :, -3:]
    expected = visible.attend(nodes, key, value, 0.3)
    odd = torch.zeros(1, 2, 130, 11)[..., :8].copy_(value)
    turned = key.transpose(1, 3).contiguous().transpose(1, 3)
    for keys, values in ((key, odd), (turned, value), (turned, odd)):
        assert torch.equal(visible.attend(nodes, keys, values, 0.3), expected)
    assert torch.equal(visible.attend(nodes.mT.contiguous().mT, key, value, 0.3), expected)


def test_a_node_sees_its_own_past_in_order() -> None:
    hidden = float("-inf")
    mask = torch.tensor([[0, 0, 0, hidden, hidden], [0, 0, hidden, 0, hidden], [0, 0, hidden, 0, 0]])
    keys = torch.arange(5.0).view(1, 1, 5, 1)
    seen = [rows.flatten().tolist() for rows, _ in Visible(mask).of_each(keys, keys)]
    assert seen == [[0, 1, 2], [0, 1, 3], [0, 1, 3, 4]]


@pytest.mark.parametrize("rows", [1, BLOCK, BLOCK + 3])
def test_fixed_rows_compute_the_same(rows: int) -> None:
    linear = torch.nn.Linear(16, 24)
    holder = torch.nn.Sequential(linear)
    fix_rows(holder)
    fix_rows(holder)  # a second time changes nothing
    fixed = holder[0]
    assert isinstance(fixed, FixedRows)
    assert (fixed.in_features, fixed.out_features) == (16, 24)
    x = torch.randn(2, rows, 16)
    torch.testing.assert_close(fixed(x), linear(x))
    for place in range(rows):
        assert torch.equal(fixed(x[:1, place : place + 1]), fixed(x)[:1, place : place + 1])


@pytest.mark.skipif(not bf16_available(), reason="this CPU has no kernels for bfloat16")
@pytest.mark.parametrize("rows", [1, TILE, TILE + 3, 3 * TILE])
def test_fixed_tiles_compute_the_same(rows: int) -> None:
    fixed = fixed_rows(Bfloat16Linear(torch.randn(24, 64), None))
    assert isinstance(fixed, FixedRows)
    x = torch.randn(1, rows, 64).bfloat16()
    for place in range(rows):
        assert torch.equal(fixed(x[:, place : place + 1]), fixed(x)[:, place : place + 1])


@pytest.mark.skipif(not packed_available(), reason="this CPU has no packed kernels")
def test_integers_need_no_blocks() -> None:
    holder = torch.nn.Sequential(torch.nn.Sequential())
    holder[0].append(Int8Linear(torch.randn(8, 8), None))
    fix_rows(holder)
    assert isinstance(holder[0][0], Int8Linear)


def test_attention_of_the_library_is_refused(tmp_path: Path) -> None:
    tiny_model("gemma2").save_pretrained(tmp_path)
    blueprint = Blueprint.open(tmp_path, Compute("float32", "cpu", batch_invariant=True))
    with pytest.raises(UserError, match=r"--batch-invariant does not work with model family 'gemma2'"):
        blueprint.stage(range(1, 2))
