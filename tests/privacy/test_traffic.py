"""Telling prompts by their traffic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aparte.answer import Writer
from aparte.config import Compute, Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.model.parts import Blueprint
from aparte.privacy.shape import ConstantShape
from aparte.privacy.traffic import SHAPE, Trace, TrafficSettings, distance, identify, shares_told
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.target.split import SplitTarget
from privacy.conftest import random_texts


@pytest.fixture(scope="module")
def writer(llama_folder: Path) -> Iterator[Writer]:
    writer = open_writer(Blueprint.open(llama_folder, Compute("float32", "cpu")), "tiny", Cut())
    yield writer
    writer.target.close()


def test_distance_of_traces() -> None:
    assert distance(Trace((9,), [(1, 2)]), Trace((9,), [(1, 2)])) == (0, 0)
    assert distance(Trace((9,), [(1, 2)]), Trace((9,), [(2, 2)])) == (0, 0.5)
    assert distance(Trace((), [(1, 2)]), Trace((), [(1, 2), (3, 3)])) == (0, 2)
    assert distance(Trace((4,), []), Trace((8,), [(3, 3)])) == (0.5, 2)


def test_traces_that_differ_are_told() -> None:
    traces = [Trace((), [(n, 1)] * 3) for n in range(1, 9)]
    assert shares_told([[trace] for trace in traces], traces) == {"top1": 1.0, "top5": 1.0}


def test_the_start_outweighs_what_follows() -> None:
    known = [[Trace((5,), [(1, 1)])], [Trace((6,), [(9, 9)])]]
    assert shares_told(known, [Trace((5,), [(9, 9)]), Trace((6,), [(1, 1)])])["top1"] == 1


def test_the_nearest_of_several_known_answers_counts() -> None:
    known = [[Trace((), [(1, 1)]), Trace((), [(9, 1)])], [Trace((), [(5, 1)])]]
    assert shares_told(known, [Trace((), [(9, 1)]), Trace((), [(5, 1)])])["top1"] == 1


def test_traces_that_are_alike_are_told_by_chance() -> None:
    """Constant shape would leave this: one in ten, five in ten."""
    traces = [Trace((7,), [(4, 1)] * 3)] * 10
    assert shares_told([[trace] for trace in traces], traces) == {"top1": 0.1, "top5": 0.5}


def test_the_same_answers_have_the_same_traffic(writer: Writer) -> None:
    prompts = [text[: 3 + place] for place, text in enumerate(random_texts(6, seed=1, longest=20))]
    settings = TrafficSettings(new_tokens=6, temperature=0.0)
    result = identify(writer, prompts, settings, 0, lambda *_: None)
    assert result["views"]["cloud"]["top1"] == 1
    assert result["prompts"] == 6
    assert result["attacker_tokens"] > 0


def test_sequential_answers_of_one_length_give_nothing_away_but_the_prompt(writer: Writer) -> None:
    prompts = [[place, *range(5, 12)] for place in range(5)]
    settings = TrafficSettings(new_tokens=5, temperature=0.0, decode="sequential")
    views = identify(writer, prompts, settings, 0, lambda *_: None)["views"]
    assert views["answer_only"]["top1"] <= 0.6


def test_constant_shape_leaves_the_number_of_steps(writer: Writer) -> None:
    """Prompts of one length: without it sizes tell them apart, with it only answers of other lengths."""
    prompts = [text[:12] for text in random_texts(30, seed=4) if len(text) >= 12][:5]
    settings = TrafficSettings(new_tokens=8, temperature=0.0, profiles=1)
    plain = identify(writer, prompts, settings, 0, lambda *_: None)["views"]
    assert isinstance(writer.target, SplitTarget)
    try:
        writer.target.protect(shape=ConstantShape(SHAPE, writer.target.max_context))
        shaped = identify(writer, prompts, settings, 0, lambda *_: None)["views"]
        decoding = Decoding(max_nodes=8, in_flight=1)
        counts = []
        for prompt in prompts:
            writer.forget()
            answer = writer.complete(
                prompt, make_drafter(decoding), sampling=Sampling(), decoding=decoding, stopping=Stopping(8)
            )
            counts.append(answer.round_trips)
    finally:
        writer.target.protect()
    by_count = sum(1 / counts.count(count) for count in counts) / len(counts)
    assert shaped["network"]["top1"] == pytest.approx(by_count, abs=1e-3)
    assert shaped["network"]["top1"] <= plain["network"]["top1"]
