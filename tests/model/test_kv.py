"""Keys and values in fewer bits: what is read is what was stored, rounded row by row."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from aparte.answer import Writer
from aparte.config import Compute, Cut, KvName, Sampling, Stopping
from aparte.device import open_writer
from aparte.errors import UserError
from aparte.model.kv import make_rows
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding

KINDS: tuple[KvName, ...] = get_args(KvName)
#: Largest error of a number, of the largest of its row.
ERRORS = {"model": 0.0, "float16": 2**-11, "float8": 2**-4, "int8": 0.5 / 127 + 1e-6}
BYTES = {"model": 4, "float16": 2, "float8": 1 + 4 / 16, "int8": 1 + 4 / 16}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_rounded_by_themselves(kind: KvName, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    new = (torch.randn(1, 2, 5, 16) * torch.logspace(-4, 4, 5)[:, None]).to(dtype)
    rows = make_rows(kind)
    rows.grow(new, 8, 0)
    first = rows.store(new[:, :, :2], 0).clone()
    read = rows.store(new[:, :, 2:], 2)
    assert read.dtype == dtype
    assert torch.equal(read[:, :, :2], first)  # later rows change nothing
    largest = new.float().abs().amax(-1, keepdim=True)
    allowed = ERRORS[kind] + (2**-8 if dtype == torch.bfloat16 and kind != "model" else 0)
    if kind == "float16":  # no scale: numbers that are too large or too small for it have no room
        assert ((read - new).float().abs() <= allowed * largest + 1e-7).all()
    else:
        assert ((read - new).float().abs() <= allowed * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_growing_and_moving_keep_the_rows(kind: KvName) -> None:
    new = torch.randn(1, 3, 6, 16)
    rows = make_rows(kind)
    assert (rows.capacity, rows.nbytes, rows.device) == (0, 0, None)
    rows.grow(new, 6, 0)
    before = rows.store(new, 0).clone()
    rows.grow(new, 20, 6)
    assert rows.capacity == 20
    assert rows.nbytes == 3 * 20 * 16 * BYTES[kind]
    rows.move(torch.tensor([3, 5]), 2)  # overlapping: row 3 is read before it is written
    read = rows.store(new[:, :, :1], 4)
    assert torch.equal(read[:, :, :4], before[:, :, [0, 1, 3, 5]])


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_rows_of_zeros(kind: KvName) -> None:
    rows = make_rows(kind)
    new = torch.zeros(1, 1, 2, 16)
    rows.grow(new, 2, 0)
    assert torch.equal(rows.store(new, 0), new)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match=r"kv.*int4.*float8"):
        Compute(kv="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_speculation_does_not_change_the_text(llama_folder: Path, kind: KvName) -> None:
    writer = open_writer(Blueprint.open(llama_folder, Compute("float32", "cpu", kv=kind)), "tiny", Cut(2, 2))
    prompt = writer.codec.encode("the cat sat on the mat and the dog sat on the log and the cat")
    texts = [answer(writer, prompt, decode) for decode in ("sequential", "auto", "lookahead")]
    assert texts[0] == texts[1] == texts[2]


def answer(writer: Writer, prompt: list[int], decode: str) -> list[int]:
    decoding = Decoding(decode, max_nodes=12)
    writer.forget()
    sampling = Sampling(temperature=0.8, seed=3)
    return writer.complete(
        prompt, make_drafter(decoding), sampling=sampling, decoding=decoding, stopping=Stopping(40)
    ).token_ids
