"""Where the time goes: arithmetic of the parts, and real steps over an emulated link that add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aparte.answer import Answer, Writer
from aparte.config import Cut, Sampling, Stopping
from aparte.decode import StepRecord
from aparte.device import open_writer
from aparte.measure.decomposition import (
    Bandwidth,
    Parts,
    decompose,
    decompose_all,
    fitted_bandwidth,
    transfer_ms,
    waited_for,
)
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
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

    def test_rounding_leaves_no_part_below_nothing(self) -> None:
        for hundredth in range(1, 2000):
            parts = decompose(record(wait_ms=20 + hundredth / 100, step_ms=50.0), Bandwidth(3.0, 7.0))
            assert min(asdict(parts.settled()).values()) >= 0.0

    def test_what_no_clock_saw_is_the_rest(self) -> None:
        assert decompose(record(step_ms=90.0)).rest_ms == pytest.approx(-16.0)

    def test_a_rest_below_nothing_was_shared_by_the_parts(self) -> None:
        parts = decompose(record(step_ms=90.0), Bandwidth(10.0, 40.0)).settled()
        assert (parts.rest_ms, parts.latency_ms, parts.device_ms) == (0.0, pytest.approx(52.0), 5.0)
        assert parts.total_ms == pytest.approx(90.0)
        assert decompose(record()).settled() == decompose(record())

    def test_an_answers_parts_are_its_whole_time(self) -> None:
        answer = Answer("auto", "2,2", 3, steps=[record(), record()], elapsed_s=0.22)
        assert answer.decomposition().total_ms == pytest.approx(220.0)
        assert answer.decomposition().rest_ms == pytest.approx(8.0)

    def test_sums_and_means(self) -> None:
        total = decompose_all([record(), record(cloud_ms=25.0, step_ms=107.0)], Bandwidth(10.0, 40.0))
        assert total.total_ms == pytest.approx(214.0)
        assert total.per(2).cloud_ms == pytest.approx(20.0)
        assert total.per(2).to_json()["total_ms"] == pytest.approx(107.0)

    def test_transfer(self) -> None:
        assert transfer_ms(125_000, 10.0) == pytest.approx(100.0)
        assert transfer_ms(125_000, None) == 0.0

    def test_what_a_step_sent_ahead_shares_is_hidden_latency_first(self) -> None:
        parts = decompose(record(ahead=True, step_ms=60.0), Bandwidth(10.0, 40.0))
        assert parts.latency_ms == pytest.approx(22.0)
        assert (parts.up_ms, parts.cloud_ms, parts.rest_ms) == (8.0, 15.0, 0.0)
        parts = decompose(record(ahead=True, step_ms=8.0), Bandwidth(10.0, 40.0))
        assert (parts.latency_ms, parts.up_ms, parts.down_ms, parts.queue_ms) == (0.0, 0.0, 0.0, 0.0)
        assert (parts.cloud_ms, parts.codec_ms, parts.device_ms) == (2.0, 1.0, 5.0)
        assert parts.total_ms == pytest.approx(8.0)
        assert decompose(record(ahead=True)).rest_ms == pytest.approx(1.0)

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


@pytest.mark.parametrize("decode", ["sequential", "context+recycling"])
def test_the_parts_in_the_json_are_the_answers_time(decode: str, llama_folder: Path) -> None:
    """Within 2 % without the rest, also where steps are sent ahead and overlap.

    Of three answers one has to be: a machine that stands still between two steps adds to one time alone.
    """
    decoding = Decoding(decode)
    apart = []
    for _ in range(3):
        with writer_over(WanProfile(rtt_ms=30, mbps=4), llama_folder) as writer:
            writer.bandwidth = Bandwidth(4.0, 4.0)
            answer = writer.complete(
                [20, 21, 22, 23] * 10,
                make_drafter(decoding),
                sampling=Sampling(),
                decoding=decoding,
                stopping=Stopping(max_new_tokens=24),
            )
        parts = answer.to_json()["parts"]
        assert parts["mbps"] == 4.0
        elapsed_ms = answer.elapsed_s * 1e3
        told = (parts["total_ms"], parts["total_ms"] - parts["rest_ms"])
        apart.append(max(abs(time_ms - elapsed_ms) / elapsed_ms for time_ms in told))
        if apart[-1] <= 0.02:
            break
    assert min(apart) <= 0.02
    assert parts["up_ms"] > 0
    assert parts["down_ms"] > 0


class TestFittedBandwidth:
    def steps(self, sizes: list[int], mbps: float, noise: float = 0.0) -> list[StepRecord]:
        found = []
        for number, size in enumerate(sizes):
            wait_ms = 30 + transfer_ms(2 * size, mbps) + noise * (-1) ** number
            timing = Timing(wait_ms=wait_ms, bytes_up=size, bytes_down=size)
            found.append(StepRecord(1, 0, 1, wait_ms, 0.0, timing))
        return found

    def test_larger_steps_tell_it(self) -> None:
        sizes = [1000, 20_000, 5000, 30_000, 1000, 10_000, 2000, 25_000, 8000, 15_000]
        found = fitted_bandwidth(self.steps(sizes, 20.0, noise=0.2))
        assert found.mbps_up == found.mbps_down == pytest.approx(20.0, rel=0.05)

    def test_it_is_unknown_where_nothing_tells_it(self) -> None:
        sizes = [1000, 20_000, 5000, 30_000, 1000, 10_000, 2000, 25_000, 8000, 15_000]
        assert fitted_bandwidth(self.steps(sizes[:6], 20.0)) == Bandwidth()
        assert fitted_bandwidth(self.steps([1000] * 12, 20.0)) == Bandwidth()
        assert fitted_bandwidth(self.steps(sizes, 1e6, noise=2.0)) == Bandwidth()
        assert fitted_bandwidth([]) == Bandwidth()
