"""The middle without a network: what a step may ask for, and what a session holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aparte.cloud.batch import Job, Share, run_alone
from aparte.cloud.engine import Engine
from aparte.cloud.load import load_engine
from aparte.cloud.sessions import Computed, LimitError, Session
from aparte.config import Cut, ServerLimits
from aparte.errors import FrameError, MismatchError, SlotError, UserError, WireOverflowError
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.model.stage import Stage
from aparte.step import ROOT, Step, chain_parents
from dialogue import chain
from running import FLOAT32
from tiny import save_tiny

WIDTH = 32
LIMITS = ServerLimits(max_nodes_per_step=8, max_pending_nodes=20)


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    return load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny", LIMITS)


@pytest.fixture
def session(engine: Engine) -> Session:
    return engine.open("float32")


def run(session: Session, step: Step, payload: bytes | None = None) -> torch.Tensor:
    computed = run_alone(session, step, random_payload(len(step), step.base) if payload is None else payload)
    return torch.frombuffer(bytearray(computed.payload), dtype=torch.float32).view(len(step), WIDTH)


def random_payload(nodes: int, seed: int) -> bytes:
    states = torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(seed))
    return states.numpy().tobytes()


def links(tip: int, base: int, count: int) -> Step:
    return Step(1, 0, tip, base, chain_parents(tip, base, count))


def test_a_step_is_answered_with_one_row_per_node_and_its_time(session: Session) -> None:
    computed = run_alone(session, links(ROOT, 0, 3), random_payload(3, 0))
    assert len(computed.payload) == 3 * WIDTH * 4
    assert computed.compute_ms > 0


def test_a_step_means_the_same_when_it_is_repeated(session: Session) -> None:
    run(session, links(ROOT, 0, 4))
    once = run(session, links(3, 4, 2))
    assert torch.equal(run(session, links(3, 4, 2)), once)


def test_a_step_with_too_many_nodes_is_refused(session: Session) -> None:
    run(session, links(ROOT, 0, 8))
    with pytest.raises(LimitError, match="9 nodes; this server takes 8"):
        run(session, links(7, 8, 9))


def test_too_many_uncommitted_nodes_are_refused(session: Session) -> None:
    for base in (0, 8):
        run(session, Step(1, 0, ROOT, base, chain_parents(base - 1, base, 8)))
    with pytest.raises(LimitError, match="24 nodes uncommitted; this server takes 20"):
        run(session, Step(1, 0, ROOT, 16, chain_parents(15, 16, 8)))


def test_committing_makes_room_for_more(session: Session) -> None:
    for base in range(0, 200, 8):
        run(session, links(base - 1, base, 8))


def test_a_rollback_that_keeps_what_it_unrolls_counts_as_uncommitted(session: Session) -> None:
    """The mask among uncommitted nodes is quadratic, however they came to be uncommitted."""
    for base in range(0, 64, 8):
        run(session, links(base - 1, base, 8))
    with pytest.raises(LimitError, match="65 nodes uncommitted"):
        run(session, Step(1, 0, ROOT, 64, (63,)))
    run(session, links(ROOT, 0, 1))  # one that forgets it is fine


def test_slots_far_away_cost_nothing(session: Session) -> None:
    with pytest.raises(LimitError):
        run(session, Step(1, 0, ROOT, 2**52, (ROOT,)))
    with pytest.raises(SlotError, match="does not hold"):
        run(session, links(2**52, 2**52 + 1, 1))
    assert session.nbytes == 0


@pytest.mark.parametrize("difference", [-WIDTH * 4, -1, 1, WIDTH * 4])
def test_a_payload_that_does_not_fit_is_refused(session: Session, difference: int) -> None:
    with pytest.raises(FrameError, match="should carry"):
        run(session, links(ROOT, 0, 3), bytes(3 * WIDTH * 4 + difference))
    assert session.nbytes == 0


def test_the_size_is_checked_before_anything_is_computed(session: Session) -> None:
    session.check(links(ROOT, 0, 2), bytes(2 * WIDTH * 4))
    with pytest.raises(FrameError, match="should carry 256 bytes and carries 255"):
        session.check(links(ROOT, 0, 2), bytes(255))


def test_numbers_that_are_not_finite_are_refused(session: Session) -> None:
    with pytest.raises(FrameError, match="not finite"):
        run(session, links(ROOT, 0, 1), b"\xff" * WIDTH * 4)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Step(2, 0, 6, 8, (6,)), id="commits a slot that is not there"),
        pytest.param(Step(2, 0, 3, 8, (7,)), id="hangs below a slot that is not there"),
        pytest.param(Step(2, 0, 3, 8, (1,)), id="hangs below a slot behind the tip"),
    ],
)
def test_slots_that_are_not_held_are_refused_and_harm_nothing(session: Session, step: Step) -> None:
    run(session, links(ROOT, 0, 4))
    once = run(session, links(3, 4, 1))
    with pytest.raises(SlotError):
        run(session, step)
    assert torch.equal(run(session, links(3, 4, 1)), once)


def test_a_sequence_longer_than_the_context_is_refused(llama_folder: Path) -> None:
    limits = ServerLimits(max_pending_nodes=128)
    engine = load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(), "tiny", limits)
    session = engine.open("float32")
    assert engine.max_context == 512
    for base in range(0, 512 + 128, 128):  # as many uncommitted nodes may hang below a full context
        run(session, links(base - 1, base, 128))
    with pytest.raises(SlotError, match="outgrow its 640 slots"):
        run(session, links(639, 640, 1))


def test_a_closed_session_takes_nothing_and_holds_nothing(session: Session) -> None:
    run(session, links(ROOT, 0, 2))
    assert session.nbytes > 0
    session.close()
    assert session.nbytes == 0
    with pytest.raises(SlotError, match="closed"):
        run(session, links(1, 2, 1))


def test_a_bad_session_does_not_disturb_another(engine: Engine) -> None:
    good, lone = engine.open("float32"), engine.open("float32")
    bad = engine.open("float32")
    expected = [run(lone, links(base - 1, base, 3)) for base in (0, 3, 6)]
    for index, base in enumerate((0, 3, 6)):
        run(bad, links(base - 1, base, 8), random_payload(8, 99))
        with pytest.raises(SlotError):
            run(bad, links(1000, 1001, 1))
        assert torch.equal(run(good, links(base - 1, base, 3)), expected[index])
    bad.close()
    assert torch.equal(run(good, links(8, 9, 1)), run(lone, links(8, 9, 1)))


@pytest.mark.parametrize("wire", ["", "int2", "float64"])
def test_an_unknown_number_format_is_refused(engine: Engine, wire: str) -> None:
    with pytest.raises(UserError, match="float16, bfloat16, float32"):
        engine.open(wire)


def test_the_largest_message_is_a_full_step_in_the_widest_format(engine: Engine) -> None:
    assert engine.max_message_bytes == 8 * WIDTH * 4 + 65_536


@pytest.fixture(scope="module")
def hot_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A middle with activations beyond what float16 can hold."""
    folder = save_tiny("llama", tmp_path_factory.mktemp("hot"))
    file = folder / "model.safetensors"
    scaled = {name: w * 1e6 if "down_proj" in name else w for name, w in load_file(file).items()}
    save_file(scaled, file, metadata={"format": "pt"})
    return load_engine(Blueprint.open(folder, FLOAT32), Cut(), "hot")


def test_an_activation_that_does_not_fit_the_wire_is_an_error(hot_engine: Engine) -> None:
    step, states = links(ROOT, 0, 1), torch.ones(1, WIDTH)
    with pytest.raises(WireOverflowError, match="--wire bfloat16"):
        run_alone(hot_engine.open("float16"), step, states.half().numpy().tobytes())
    run_alone(hot_engine.open("bfloat16"), step, states.bfloat16().view(torch.int16).numpy().tobytes())
    hot_engine.probe()  # which speaks float32


class Broken(Stage):
    """Gives what is not a number."""

    def __init__(self, stage: Stage) -> None:
        self.__dict__ = stage.__dict__

    def forward(self, cache, step, hidden):  # type: ignore[no-untyped-def]
        return super().forward(cache, step, hidden) * float("nan")


def test_probing_finds_a_middle_that_does_not_work(engine: Engine) -> None:
    engine.probe()
    broken = Engine(Broken(engine._stage), engine.fingerprint, WIDTH)
    with pytest.raises(WireOverflowError):
        broken.probe()


def test_chains_of_the_tests_are_well_formed() -> None:
    assert chain(3, 5, 2).step == Step(3, 0, 5, 6, (5, 6))


@pytest.fixture(scope="module")
def hosting(llama_folder: Path) -> Engine:
    return load_engine(Blueprint.open(llama_folder, FLOAT32), Cut(1, 1), "tiny", LIMITS, inner=True)


class TestInnerCuts:
    """Sessions that use some of the hosted layers: 2 to 4 of a model of six."""

    def test_a_part_computes_what_a_server_of_its_own_would(self, hosting: Engine, engine: Engine) -> None:
        assert torch.equal(
            run(hosting.open("float32", "2,2"), links(ROOT, 0, 4)),
            run(engine.open("float32"), links(ROOT, 0, 4)),
        )

    def test_sessions_of_several_cuts_in_one_pass(self, hosting: Engine) -> None:
        cuts = ("2,2", "", "2,2", "3,1")
        sessions = [hosting.open("float32", cut) for cut in cuts]
        step, payload = links(ROOT, 0, 3), random_payload(3, 9)
        outcomes = hosting.run_pass([Share(Job(session, step, payload), 3) for session in sessions])
        alone = [
            run_alone(hosting.open("float32", cut), step, payload).payload
            for cut in ("2,2", "", "2,2", "3,1")
        ]
        for outcome, payload_alone in zip(outcomes, alone, strict=True):
            assert isinstance(outcome, Computed)
            got, wanted = (
                torch.frombuffer(bytearray(data), dtype=torch.float32)
                for data in (outcome.payload, payload_alone)
            )
            assert torch.allclose(got, wanted, atol=1e-5)

    def test_it_holds_no_cache_for_layers_that_it_does_not_use(self, hosting: Engine) -> None:
        part, whole = hosting.open("float32", "2,3"), hosting.open("float32")
        for session in (part, whole):
            run(session, links(ROOT, 0, 3))
        assert part.nbytes * len(whole.stage.layer_indices) == whole.nbytes * len(part.stage.layer_indices)

    @pytest.mark.parametrize("cut", ["0,1", "1,0", "3,3", "5,1", "9,9", "2", "2,2,2", " 2,2", "x", "9" * 250])
    def test_what_is_not_inside_is_refused(self, hosting: Engine, llama_folder: Path, cut: str) -> None:
        blueprint = Blueprint.open(llama_folder, FLOAT32)
        asked = replace(take_fingerprint(blueprint, Cut(2, 2), "tiny"), cut=cut)
        with pytest.raises(MismatchError, match="cuts tiny at 1,1"):
            hosting.check(asked)
        assert len(hosting._parts) <= 4

    def test_other_weights_of_the_part_are_noticed(self, hosting: Engine, llama_folder: Path) -> None:
        asked = take_fingerprint(Blueprint.open(llama_folder, FLOAT32), Cut(2, 2), "tiny")
        hosting.check(asked)
        with pytest.raises(MismatchError, match="different weights"):
            hosting.check(replace(asked, tensors="0" * 32))
