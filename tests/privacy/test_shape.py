"""Constant shape: what an observer sees is the same for every step, and the text is what it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aparte.answer import Answer, Writer
from aparte.config import Compute, Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.errors import UserError
from aparte.model.parts import Blueprint
from aparte.privacy.protection import Protection
from aparte.privacy.shape import ConstantShape, ShapeSettings
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.step import ROOT, Step
from aparte.target.exchange import message_of
from aparte.target.split import SplitTarget


class Clock:
    """Time that passes when somebody sleeps, or a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


def shape(text: str = "8", max_context: int = 512, clock: Clock | None = None) -> ConstantShape:
    clock = clock or Clock()
    return ConstantShape(
        ShapeSettings.parse(text), max_context, draw=random.Random(0), clock=clock, sleep=clock.sleep
    )


@pytest.mark.parametrize(
    ("text", "settings"),
    [("16", ShapeSettings(16)), ("1@0.5", ShapeSettings(1, 0.5)), ("9@200", ShapeSettings(9, 200))],
)
def test_settings(text: str, settings: ShapeSettings) -> None:
    assert ShapeSettings.parse(text) == settings


@pytest.mark.parametrize(
    "text", ["", "x", "8@", "8@x", "0", "-1", "258", "8@0", "8@-2", "8@nan", "8@inf", "8.5"]
)
def test_broken_settings(text: str) -> None:
    with pytest.raises(UserError):
        ShapeSettings.parse(text)


class TestFilling:
    def test_a_step_keeps_its_nodes_and_gets_more_below_them(self) -> None:
        filler = shape("8")
        step, tokens = filler.fill(Step(1, 0, ROOT, 0, (ROOT, 0, 1)), [5, 6, 7])
        assert (step.number, step.epoch, step.commit, step.base) == (1, 0, ROOT, 0)
        assert step.parents[:3] == (ROOT, 0, 1)
        assert list(tokens[:3]) == [5, 6, 7]
        assert len(step) == len(tokens) == 8
        assert all(0 <= parent < slot for parent, slot in zip(step.parents[3:], step.slots[3:], strict=True))
        assert set(tokens[3:]) <= {5, 6, 7}

    def test_a_full_step_is_left_alone(self) -> None:
        step = Step(1, 0, ROOT, 0, (ROOT, 0))
        assert shape("2").fill(step, [1, 2]) == (step, [1, 2])

    def test_a_step_that_is_too_large_is_refused(self) -> None:
        with pytest.raises(UserError, match="has 3 nodes"):
            shape("2").fill(Step(1, 0, ROOT, 0, (ROOT, 0, 1)), [1, 2, 3])

    def test_no_filling_lies_beyond_the_context(self) -> None:
        filler = shape("6", max_context=5)
        step, _ = filler.fill(Step(1, 0, ROOT, 0, (ROOT, 0, 1, 2)), [1, 2, 3, 4])
        following, _ = filler.fill(Step(2, 0, 3, 4, (3,)), [5])
        depths = {ROOT: -1}
        for one in (step, following):
            for slot, parent in zip(one.slots, one.parents, strict=True):
                depths[slot] = depths[parent] + 1
                assert depths[slot] < 5

    def test_every_message_has_one_size(self) -> None:
        filler = shape("4")
        sizes = set()
        for number, base in ((1, 0), (12345, 999_999)):
            step, _ = filler.fill(Step(number, 0, ROOT, base, (ROOT,)), [1])
            sizes.add(len(filler.seal(message_of(step, b"x" * 64))))
        assert len(sizes) == 1


class TestCadence:
    def test_steps_go_out_on_the_beat(self) -> None:
        clock = Clock()
        beat = shape("4@100", clock=clock)
        times = []
        for busy_s in (0.03, 0.07, 0.0, 0.099):
            beat.wait()
            times.append(round(clock.now, 6))
            clock.now += busy_s
        assert times == [100.0, 100.1, 100.2, 100.3]
        assert (beat.steps, beat.late) == (4, 0)

    def test_a_late_step_waits_for_the_next_beat_and_is_counted(self) -> None:
        clock = Clock()
        beat = shape("4@100", clock=clock)
        beat.wait()
        clock.now += 0.25
        beat.wait()
        assert clock.now == pytest.approx(100.3)
        assert beat.late == 1

    def test_a_pause_between_answers_is_not_late(self) -> None:
        clock = Clock()
        beat = shape("4@100", clock=clock)
        beat.wait()
        clock.now += 60
        beat.begin()
        beat.wait()
        assert beat.late == 0
        assert clock.slept == []

    def test_without_a_cadence_nobody_waits(self) -> None:
        clock = Clock()
        free = shape("4", clock=clock)
        free.wait()
        free.wait()
        assert clock.slept == []


@pytest.fixture
def writer(llama_folder: Path) -> Iterator[Writer]:
    blueprint = Blueprint.open(llama_folder, Compute("float32", "cpu"))
    writer = open_writer(blueprint, "tiny", Cut(), wire="float32")
    yield writer
    writer.target.close()


def answer(writer: Writer, prompt: list[int], decode: str = "auto", new_tokens: int = 20) -> Answer:
    writer.forget()
    decoding = Protection(shape=ShapeSettings(8)).limit(Decoding(decode))
    return writer.complete(
        prompt,
        make_drafter(decoding),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(new_tokens),
    )


PROMPTS = [[7, 8, 9] * 9, list(range(30, 60)), [5] * 31]


@pytest.mark.parametrize("decode", ["auto", "sequential", "lookahead"])
def test_the_text_is_what_it_was_and_every_step_looks_the_same(writer: Writer, decode: str) -> None:
    plain = [answer(writer, prompt, decode).token_ids for prompt in PROMPTS]
    assert isinstance(writer.target, SplitTarget)
    writer.target.protect(shape=shape("8"))
    shaped = [answer(writer, prompt, decode) for prompt in PROMPTS]
    assert [one.token_ids for one in shaped] == plain
    sizes = {step.timing.bytes_up for one in shaped for step in one.steps[1:]}
    assert len(sizes) == 1, "but for the first, which sums up the messages of the prompt"
    size = sizes.pop()
    assert all(one.bytes_up % size == 0 for one in shaped)
    down = {step.timing.bytes_down for one in shaped for step in one.steps[1:]}
    assert max(down) - min(down) <= 12, "the digits of the times that the cloud reports"
    if decode == "auto":
        assert len({step.drafted for one in shaped for step in one.steps[1:]}) > 1, "something was hidden"


def test_a_conversation_goes_on_over_the_filling(writer: Writer) -> None:
    first = answer(writer, PROMPTS[1])
    longer = [*PROMPTS[1], *first.token_ids, 40, 41]
    expected = answer(writer, longer).token_ids
    assert isinstance(writer.target, SplitTarget)
    writer.target.protect(shape=shape("8"))
    answer(writer, PROMPTS[1])
    decoding = Decoding(max_nodes=7, in_flight=1)
    again = writer.complete(
        longer, make_drafter(decoding), sampling=Sampling(), decoding=decoding, stopping=Stopping(20)
    )
    assert again.reused_tokens > 30
    assert again.token_ids == expected


def test_the_end_of_the_context_is_no_obstacle(writer: Writer) -> None:
    assert isinstance(writer.target, SplitTarget)
    prompt = [int(token) for token in torch.randint(250, (500,), generator=torch.Generator().manual_seed(0))]
    plain = answer(writer, prompt, new_tokens=50).token_ids
    writer.target.protect(shape=shape("8", max_context=512))
    assert answer(writer, prompt, new_tokens=50).token_ids == plain
    assert len(plain) <= 12


def test_protection_limits_decoding() -> None:
    protection = Protection.parse("split", "none", "16@100")
    decoding = protection.limit(Decoding())
    assert (decoding.max_nodes, decoding.in_flight) == (15, 1)
    assert Protection().limit(Decoding()) == Decoding()
    with pytest.raises(UserError, match="--in-flight"):
        protection.limit(Decoding(in_flight=2))
    with pytest.raises(UserError, match="--target split"):
        Protection.parse("local", "none", "16")
    with pytest.raises(UserError, match="--target split"):
        Protection.parse("draft", "int8", None)
