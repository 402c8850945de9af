"""Where the time goes: arithmetic of the parts, and real steps over an emulated link that add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aparte.answer import Answer, Writer
from aparte.config import Cut, Decoding, Sampling, Stopping
from aparte.decode import StepRecord
from aparte.device import open_writer
from aparte.measure.decomposition import Bandwidth, Parts, decompose, decompose_all, transfer_ms, waited_for
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.target.base import Timing
from running import FLOAT32, running_server


def record(*, ahead: bool = False, stale: int = 0, **changes: float) -> StepRecord:
    timing = {"device_ms": 3.0, "codec_ms": 1.0, "wait_ms": 100.0, "cloud_ms": 15.0, "queue_ms": 5.0}
    sizes = {"bytes_up": 10_000, "bytes_down": 20_000}
    step_ms = changes.pop("step_ms", 107.0)
    return StepRecord(1, 0, 1, step_ms, 2.0, Timing(**{**timing, **changes}, **sizes), ahead, stale)


class TestParts:
    def test_a_step_is_divided_by_both_clocks_and_the_bandwidth(self) -> None:
        parts = decompose(record(), Bandwidth(10.0, 40.0))
        assert parts == Parts(
            device_ms=5.0, codec_ms=1.0, cloud_ms=15.0, queue_ms=5.0, up_ms=8.0, down_ms=4.0, latency_ms=68.0,
            rest_ms=1.0,
        )  # fmt: skip
        assert parts.total_ms == pytest.approx(107.0)
        assert parts.network_ms == pytest.approx(80.0)
        assert parts.largest == "latency"

    def test_without_a_bandwidth_all_of_the_network_is_latency(self) -> None:
        parts = decompose(record())
        assert (parts.up_ms, parts.down_ms, parts.latency_ms) == (0.0, 0.0, 80.0)

    def test_transfer_is_never_more_than_the_network_took(self) -> None:
        parts = decompose(record(), Bandwidth(1.0, 1.0))
        assert parts.latency_ms == pytest.approx(0.0)
        assert parts.up_ms + parts.down_ms == pytest.approx(80.0)
        assert parts.down_ms == pytest.approx(2 * parts.up_ms)
        assert parts.largest == "transfer"

    def test_what_no_clock_saw_is_the_rest(self) -> None:
        assert decompose(record(step_ms=90.0)).rest_ms == pytest.approx(-16.0)

    def test_sums_and_means(self) -> None:
        total = decompose_all([record(), record(cloud_ms=25.0, step_ms=107.0)], Bandwidth(10.0, 40.0))
        assert total.total_ms == pytest.approx(214.0)
        assert total.per(2).cloud_ms == pytest.approx(20.0)
        assert total.per(2).to_json()["total_ms"] == pytest.approx(107.0)

    def test_transfer(self) -> None:
        assert transfer_ms(125_000, 10.0) == pytest.approx(100.0)
        assert transfer_ms(125_000, None) == 0.0

    def test_overlapping_steps_are_told_apart(self) -> None:
        first, plain, ahead, after, stale, last = (
            record(), record(), record(ahead=True), record(), record(stale=1), record(),
        )  # fmt: skip
        assert waited_for([first, plain, ahead, after, stale, last]) == [plain, last]


@contextmanager
def writer_over(profile: WanProfile, folder: Path) -> Iterator[Writer]:
    with running_server(folder) as (_, url):
        address = ("127.0.0.1", urlsplit(url).port or 0)
        with WanRelay(("127.0.0.1", 0), address, profile) as relay:
            writer = open_writer(
                Blueprint.open(folder, FLOAT32), "tiny", Cut(), cloud=f"ws://127.0.0.1:{relay.port}"
            )
            writer.codec.eos = frozenset()
            yield writer
            writer.target.close()


def write(writer: Writer, decode: str, max_nodes: int | None = None) -> Answer:
    decoding = Decoding(decode, max_nodes=max_nodes, in_flight=1)
    return writer.complete(
        tuple(range(20, 60)),
        make_drafter(decoding),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(max_new_tokens=24),
    )


@pytest.mark.parametrize(("decode", "max_nodes"), [("sequential", None), ("context+recycling", 12)])
def test_the_parts_of_real_steps_add_up(decode: str, max_nodes: int | None, llama_folder: Path) -> None:
    """Sum equals wall time within 2 %, without counting the rest, on a link of 30 ms and 4 Mbit/s."""
    with writer_over(WanProfile(rtt_ms=30, mbps=4), llama_folder) as writer:
        steps = write(writer, decode, max_nodes).steps
    total = decompose_all(steps, Bandwidth(4.0, 4.0))
    assert total.known_ms == pytest.approx(sum(step.step_ms for step in steps), rel=0.02)
    mean = decompose_all(steps[1:], Bandwidth(4.0, 4.0)).per(len(steps) - 1)
    size = sum(step.timing.bytes_up + step.timing.bytes_down for step in steps[1:]) / (len(steps) - 1)
    assert mean.up_ms + mean.down_ms == pytest.approx(size * 8 / 4e3)
    assert mean.latency_ms == pytest.approx(30, rel=0.25)
    assert mean.largest == "latency"
