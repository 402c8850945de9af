"""The embedded default model on real prompts: the split text is the unsplit model's (float32)."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from aparte.answer import Writer
from aparte.config import Compute, Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.measure.prompts import PROMPTS
from aparte.measure.verify import Reference, Report, Written, write_split
from aparte.model.linear import packed_available
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from running import FLOAT32

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("all_cores"),
]

NEW_TOKENS = 10
CUTS = [Cut(2, 2), Cut(1, 1), Cut(8, 8)]
MODES = [
    Decoding("sequential"),
    Decoding("jacobi", jacobi_block=4),
    Decoding("lookahead", ngram=3),
    Decoding("lookahead", ngram=5),
]
OTHERS = [Decoding("auto"), Decoding("context+runner-up", max_nodes=4)]


@functools.cache
def writer_for(folder: Path, cut: Cut) -> Writer:
    return open_writer(Blueprint.open(folder, FLOAT32), "default", cut, wire="float32")


def encode(folder: Path, text: str) -> list[int]:
    return writer_for(folder, CUTS[0]).codec.encode_chat([{"role": "user", "content": text}])


@functools.cache
def unsplit(folder: Path) -> list[Written]:
    """The reference for each prompt, by ``transformers``' own ``generate``."""
    reference = Reference(Blueprint.open(folder, FLOAT32), writer_for(folder, CUTS[0]).codec.eos)
    return [reference.write(encode(folder, text), NEW_TOKENS) for text in PROMPTS]


def test_there_are_twelve_prompts() -> None:
    assert len(set(PROMPTS)) == 12


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.decode}{mode.ngram}")
def test_greedy_equals_the_unsplit_model(default_model: Path, cut: Cut, mode: Decoding) -> None:
    writer = writer_for(default_model, cut)
    report = Report("float32", "float32", str(cut), mode.decode)
    for text, expected in zip(PROMPTS, unsplit(default_model), strict=True):
        writer.forget()
        written = write_split(writer, encode(default_model, text), mode, NEW_TOKENS)
        assert written.tokens == expected.tokens, text
        report.add(expected, written, written)
    result = report.to_json()
    assert result["identical_share"] == 1.0
    assert result["max_logit_diff"] < 1e-3
    perplexity = result["self_perplexity"]
    assert perplexity["sequential"] == pytest.approx(perplexity["unsplit"], abs=5e-4)
    assert math.isfinite(perplexity["unsplit"])


def test_a_seed_gives_the_same_text_with_every_mode(default_model: Path) -> None:
    writer = writer_for(default_model, CUTS[0])
    for prompt, sampling in (
        (PROMPTS[6], Sampling(temperature=0.9, top_p=0.9, seed=4)),
        (PROMPTS[0], Sampling(temperature=0.6, top_k=40, min_p=0.02, seed=5)),
    ):
        texts = []
        for mode in [*MODES, *OTHERS]:
            writer.forget()
            answer, pieces = writer.write(
                encode(default_model, prompt),
                make_drafter(mode),
                sampling=sampling,
                decoding=mode,
                stopping=Stopping(24),
            )
            texts.append("".join(piece.text for piece in pieces))
            assert answer.text == texts[0]
        assert len(set(texts)) == 1


@pytest.mark.skipif(not packed_available(), reason="this CPU has no packed half-precision kernels")
def test_the_default_precision_is_the_same_with_and_without_speculation(default_model: Path) -> None:
    """Packed half precision and float16 on the wire, which is what users run."""
    writer = open_writer(Blueprint.open(default_model, Compute()), "default", Cut(2, 2))
    for text in PROMPTS[:4]:
        prompt = encode(default_model, text)
        sequential = write_split(writer, prompt, Decoding("sequential"), 24)
        for mode in [*MODES[1:], *OTHERS]:
            writer.forget()
            assert write_split(writer, prompt, mode, 24).tokens == sequential.tokens


def test_lookahead_beats_paper_a_on_code(default_model: Path) -> None:
    """More than 1.25 tokens per round trip on a code prompt."""
    writer = writer_for(default_model, CUTS[0])
    writer.forget()
    mode = Decoding("lookahead")
    answer, pieces = writer.write(
        encode(default_model, PROMPTS[0]),
        make_drafter(mode),
        sampling=Sampling(),
        decoding=mode,
        stopping=Stopping(96),
    )
    for _ in pieces:
        pass
    assert answer.mat > 1.25
