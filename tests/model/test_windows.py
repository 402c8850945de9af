"""Recorded steps give what the layers give, for any tree, in buffers of any size.

CUDA graphs need a GPU. Here a recording is made by tracing: the operations of one run, on the same tensors in
memory, which are then repeated without the Python that led to them. What a graph could not repeat (a shape
or a number that was different in that run, another buffer) a trace does not repeat either.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from aparte.cloud.inprocess import InProcessLink
from aparte.cloud.load import load_engine
from aparte.config import Compute, Cut, Sampling
from aparte.decode import Job, decode
from aparte.errors import UserError
from aparte.model import windows
from aparte.model.parts import Blueprint, Embedding
from aparte.model.precision import Precision, _check_graphs
from aparte.model.stage import Item, Stage
from aparte.model.windows import Outputs, Run, Windows
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing
from aparte.step import Step, chain_parents
from aparte.target.split import DeviceParts, SplitTarget
from drafters import RandomTrees
from random_steps import Model, draw_step
from running import FLOAT32
from tiny import VARIANTS, tiny_model

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}


class Traced:
    """Recordings by tracing, counted."""

    def __init__(self) -> None:
        self.made = 0
        self.repeated = 0

    def __call__(self, run: Run) -> Run:
        self.made += 1
        with torch.no_grad():
            graph = make_fx(run)()

        def replay() -> Outputs:
            self.repeated += 1
            result: Outputs = graph()
            return result

        return replay


class Twice:
    """The same layers with recordings and without, and what each makes of the same steps."""

    def __init__(self, stage: Stage, embed: Embedding) -> None:
        self.traced = Traced()
        self.plain, self.recorded = stage, stage.part(stage.layer_indices)
        self.recorded.recordings = Windows(self.traced)
        self.embed = embed
        self.caches = self.plain.new_cache(), self.recorded.new_cache()

    def forward(self, step: Step, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(torch.tensor(tokens))
        return (
            self.plain.forward(self.caches[0], step, hidden),
            self.recorded.forward(self.caches[1], step, hidden),
        )

    def same(self, step: Step, tokens: list[int]) -> None:
        expected, got = self.forward(step, tokens)
        torch.testing.assert_close(got, expected, **CLOSE)

    def chain(self, count: int, first: int = 0, number: int = 0) -> int:
        """A prompt of so many tokens; the slot of the last."""
        step = Step(number, 0, first - 1, first, chain_parents(first - 1, first, count))
        self.same(step, [place % 250 for place in range(count)])
        return first + count - 1


@functools.cache
def loaded(folder: Path) -> tuple[Stage, Embedding]:
    blueprint = Blueprint.open(folder, FLOAT32)
    embed, _ = blueprint.ends()
    return blueprint.stage(range(blueprint.layers)), embed


@pytest.fixture
def twice(llama_folder: Path) -> Twice:
    return Twice(*loaded(llama_folder))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tiny_model(name, layers=3).save_pretrained(folder)
        return folder

    return make


#: Their experts look at which rows they get, which no recording can.
EXPERTS = ("mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in EXPERTS])
def test_every_family(folder_of: Callable[[str], Path], name: str) -> None:
    """Steps of several sizes past the sliding window, each size more often than it takes to be recorded."""
    both = Twice(*loaded(folder_of(name)))
    tip = both.chain(14)
    for number in range(1, 13):
        base = tip + 1
        # A chain of two with a second guess at its first node; or a node alone.
        parents = (tip, tip, base + 1) if number % 2 else (tip,)
        both.same(Step(number, 0, tip, base, parents), [number + place for place in range(len(parents))])
        tip = base + len(parents) - 1
    assert both.traced.made == 2
    assert both.traced.repeated == 10


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_trees(llama_folder: Path, data: st.DataObject) -> None:
    both, model = Twice(*loaded(llama_folder)), Model()
    for number in range(data.draw(st.integers(3, 9), label="steps")):
        step, tokens = draw_step(data, model, number)
        both.same(step, tokens)
        both.caches[1].check_integrity()


def test_a_cache_that_grows_gets_new_recordings(twice: Twice, monkeypatch: pytest.MonkeyPatch) -> None:
    tip = twice.chain(252)
    for number in range(1, 12):  # rows 252 to 262: over the end of the first buffers of 256
        twice.same(Step(number, 0, tip, tip + 1, (tip,)), [number])
        tip += 1
    # Rows 253 and 254 in the old buffers; 255 and 256 by the layers; then wanted once, and the rest.
    assert twice.traced.made == 2
    assert twice.traced.repeated == 2 + 5


def test_the_row_that_is_left_free_is_used_in_the_end(twice: Twice) -> None:
    """What nodes that only fill up leave in the last row is overwritten before anybody sees it."""
    tip = twice.chain(250)
    for number in range(1, 3):
        base = tip + 1
        twice.same(Step(number, 0, tip, base, (tip, base, base + 1)), [1, 2, 3])
    assert twice.traced.made == 1
    twice.chain(6, first=tip + 1, number=3)
    twice.same(Step(4, 0, tip + 6, tip + 7, (tip + 6,)), [4])


def test_rare_steps_and_long_ones_are_not_recorded(twice: Twice) -> None:
    tip = twice.chain(5)
    for number, count in enumerate((1, 2, 3, 65, 65, 65), 1):
        parents = chain_parents(tip, tip + 1, count)
        twice.same(Step(number, 0, tip, tip + 1, parents), [7] * count)
    assert twice.traced.made == 0


def test_a_layer_that_is_wanted_too(twice: Twice) -> None:
    twice.chain(3)
    for number in range(1, 5):
        step, hidden = Step(number, 0, 2, 3, (2, 3)), twice.embed(torch.tensor([9, 8]))
        expected = twice.plain.forward_one(Item(twice.caches[0], step, hidden, tap=0))
        output = twice.recorded.forward_one(Item(twice.caches[1], step, hidden, tap=0))
        assert output.tapped is not None
        assert expected.tapped is not None
        torch.testing.assert_close(output.hidden, expected.hidden, **CLOSE)
        torch.testing.assert_close(output.tapped, expected.tapped, **CLOSE)
    assert twice.traced.made == 1
    twice.same(Step(5, 0, 2, 3, (2, 3)), [9, 8])  # without: a recording of its own
    twice.same(Step(6, 0, 2, 3, (2, 3)), [9, 8])
    assert twice.traced.made == 2


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_other_kinds_of_caches_have_no_recordings(twice: Twice, kind: Any) -> None:
    twice.recorded._kv = kind
    cache = twice.recorded.new_cache()
    for number in range(4):
        hidden = twice.embed(torch.tensor([9]))
        twice.recorded.forward(cache, Step(number, 0, number - 1, number, (number - 1,)), hidden)
    assert twice.traced.made == 0


def test_what_a_recording_gives_is_not_overwritten_by_the_next(twice: Twice) -> None:
    tip = twice.chain(4)
    kept = []
    for number in range(1, 6):
        _, got = twice.forward(Step(number, 0, tip, tip + 1, (tip,)), [number])
        kept.append((got, got.clone()))
    assert twice.traced.repeated == 4
    for got, then in kept:
        assert torch.equal(got, then)


def test_recordings_go_with_their_session(twice: Twice) -> None:
    recordings = twice.recorded.recordings
    assert recordings is not None
    twice.chain(4)
    twice.same(Step(1, 0, 3, 4, (3,)), [1])
    assert len(recordings._of) == 1
    twice.caches = twice.caches[0], twice.recorded.new_cache()
    gc.collect()
    assert len(recordings._of) == 0


def test_there_is_a_limit(twice: Twice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST", 3)
    recordings = twice.recorded.recordings
    assert recordings is not None
    caches = [twice.recorded.new_cache() for _ in range(5)]
    for number in range(3):
        for cache in caches:
            hidden = twice.embed(torch.tensor([9]))
            twice.recorded.forward(cache, Step(number, 0, number - 1, number, (number - 1,)), hidden)
    assert sum(map(len, recordings._of.values())) == 3
    assert caches[0] not in recordings._of


@pytest.mark.parametrize(
    "drafter", [Nothing(), RandomTrees([place * 7 % 250 for place in range(60)], seed=1)]
)
def test_the_text_stays_the_same(llama_folder: Path, drafter: Drafter) -> None:
    """A cloud with recordings, probed as when it starts, and a device that drafts trees."""
    texts = []
    for record in (None, Traced()):
        engine = load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(1, 1), "tiny")
        engine._stage.recordings = None if record is None else Windows(record)
        engine.probe()
        assert record is None or (record.made, record.repeated) == (1, 1)
        target = SplitTarget(
            DeviceParts(Blueprint.open(llama_folder, FLOAT32), Cut(1, 1)),
            InProcessLink(engine, "float32"),
            "float32",
        )
        job = Job(tuple(range(20)), Sampling(), 24, frozenset(), 12)
        texts.append([token for block in decode(target, Session(), drafter, job) for token in block.tokens])
        assert record is None or record.repeated > 10
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("compute", "device", "message"),
    [
        (Compute(graphs=True), "cpu", "computes on cpu"),
        (Compute(graphs=True), "mps", "computes on mps"),
        (Compute(kv="int8", graphs=True), "cuda", "Leave it or --kv out"),
        (Compute(batch_invariant=True, graphs=True), "cuda", "exclude each other"),
    ],
)
def test_what_recordings_are_not_for(compute: Compute, device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _check_graphs(compute, torch.device(device))


def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(UserError, match="--graphs is for NVIDIA's GPUs"):
        Precision.resolve(Compute(device="cpu", graphs=True))
