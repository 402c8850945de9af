"""Examinations of real servers: direct, behind an emulated relay, with TLS and a token; and of others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aparte.cloud.door import pin_of, tls_context
from aparte.config import Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.errors import DoorError, LinkError, UserError
from aparte.measure.decomposition import Parts
from aparte.measure.doctor import Diagnosis, Sample, examine
from aparte.measure.doctor_compare import compare
from aparte.measure.doctor_path import Door
from aparte.measure.doctor_sample import take_sample
from aparte.measure.link_probe import LinkFigures
from aparte.measure.rtt_runs import Device, Reach
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from certificates import make_certificate
from running import FLOAT32, running_server


@contextmanager
def relayed(url: str, profile: WanProfile) -> Iterator[str]:
    with WanRelay(("127.0.0.1", 0), ("127.0.0.1", urlsplit(url).port or 0), profile) as relay:
        yield f"ws://127.0.0.1:{relay.port}"


def test_a_direct_path_and_a_relayed_one_are_told_apart(llama_folder: Path) -> None:
    with running_server(llama_folder) as (_, url), relayed(url, WanProfile(rtt_ms=60)) as far:
        near_by, behind = examine(Door(url)).to_json(), examine(Door(far)).to_json()
    assert near_by["relayed"] is False
    assert not any("takes the connection" in problem for problem in near_by["problems"])
    assert behind["relayed"] is True
    assert behind["tcp_rtt_ms"] < 20
    assert behind["ws_rtt_ms"] == pytest.approx(60, abs=12)
    assert behind["first_byte_ms"] >= 60
    assert behind["relay_adds_ms"] == pytest.approx(60, abs=12)
    assert "takes the connection" in behind["problems"][0]
    assert behind["health"]["status"] == "ok"
    assert behind["tls_ms"] is None


def test_two_ways_to_one_cloud_are_compared(llama_folder: Path) -> None:
    with running_server(llama_folder) as (_, url), relayed(url, WanProfile(rtt_ms=40)) as far:
        direct, tunnel, again = (examine(Door(where)) for where in (url, far, url))
    assert compare(direct, tunnel).startswith(f"{url} is ")
    assert compare(tunnel, direct).startswith(f"{url} is ")
    assert "the same within" in compare(direct, again)
    assert "nothing to compare" in compare(direct, Diagnosis("ws://127.0.0.1:1"))


def test_jitter_is_seen(llama_folder: Path) -> None:
    profile = WanProfile(rtt_ms=2, jitter_ms=40)
    with running_server(llama_folder) as (_, url), relayed(url, profile) as far:
        found = examine(Door(far)).to_json()
    assert found["jitter_ms"] > 5
    assert any("differ by" in problem for problem in found["problems"])


def test_with_a_model_it_predicts_what_an_answer_then_takes(llama_folder: Path) -> None:
    with running_server(llama_folder) as (_, url), relayed(url, WanProfile(rtt_ms=50, mbps=2)) as far:
        blueprint = Blueprint.open(llama_folder, FLOAT32)
        device = Device(blueprint, "tiny", Cut(), Reach(wire="float32"))
        found = examine(Door(far), lambda: take_sample(device, far)).to_json()
        writer = open_writer(blueprint, "tiny", Cut(), cloud=far, wire="float32")
        writer.codec.eos = frozenset()
        answer = writer.complete(
            tuple(range(20, 50)),
            make_drafter(Decoding("sequential")),
            sampling=Sampling(),
            decoding=Decoding("sequential", in_flight=1),
            stopping=Stopping(max_new_tokens=16),
        )
        writer.target.close()
    took_ms = sum(step.step_ms for step in answer.steps[1:]) / (len(answer.steps) - 1)
    assert found["prediction_tok_s"] == pytest.approx(1e3 / took_ms, rel=0.25)
    assert found["mbps_up"] == pytest.approx(2, rel=0.15)
    assert found["mbps_down"] == pytest.approx(2, rel=0.35)
    assert found["probe_token_ms"] > 50
    assert found["step"]["total_ms"] == pytest.approx(1e3 / found["prediction_tok_s"], rel=0.01)
    assert found["limit"].startswith("The round trip limits speed")
    assert found["prediction_speculative_tok_s"] > 0
    assert found["cloud"]["dtype"] == found["device_dtype"] == "float32"
    assert found["cloud"]["model"]["cut"] == "2,2"


class TestTrouble:
    def test_a_wrong_token(self, llama_folder: Path) -> None:
        with running_server(llama_folder, token="right") as (_, url):
            found = examine(Door(url, token="wrong"))
            assert isinstance(found.failure, DoorError)
            assert found.tcp_ms, "what worked until then is kept"
            assert found.to_json()["problems"] == [str(found.failure)]
            assert examine(Door(url, token="right")).failure is None

    def test_tls(self, llama_folder: Path, tmp_path: Path) -> None:
        cert, key = make_certificate(tmp_path)
        with running_server(llama_folder, tls=tls_context(cert, key)) as (_, url):
            examined = examine(Door(url, ca_file=cert))
            assert examined.failure is None
            found = examined.to_json()
            assert found["tls_ms"] > 0
            assert found["first_byte_ms"] > 0
            assert found["health"]["status"] == "ok"
            assert examine(Door(url, pins=(pin_of(cert),))).failure is None
            pinned = examine(Door(url, pins=("sha256:" + "0" * 64,)))
            assert isinstance(pinned.failure, DoorError)
            assert "another certificate" in pinned.problems[0]
            strange = examine(Door(url))
            assert isinstance(strange.failure, DoorError)
            assert "--tls-ca" in strange.problems[0]

    def test_nobody_there(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        found = examine(Door(f"ws://127.0.0.1:{port}"))
        assert isinstance(found.failure, LinkError)
        assert found.to_json()["tcp_rtt_ms"] is None
        assert found.to_json()["relayed"] is None

    def test_another_model(self, tiny_folders: dict[str, Path]) -> None:
        with running_server(tiny_folders["llama"]) as (_, url):
            other = Device(Blueprint.open(tiny_folders["qwen2"], FLOAT32), "other", Cut(), Reach())
            found = examine(Door(url), lambda: take_sample(other, url))
        assert "different architectures" in found.problems[0]
        assert found.to_json()["ws_rtt_ms"] is not None

    def test_no_address(self) -> None:
        with pytest.raises(UserError, match="is not a cloud's address"):
            examine(Door("here"))

    def test_a_proxy_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        monkeypatch.delenv("NO_PROXY", raising=False)
        found = examine(Door("ws://cloud.invalid:7600"))
        assert found.to_json()["relayed"] is True
        assert any("through a proxy" in problem for problem in found.problems)
        assert any("encrypts" in problem for problem in found.problems)


class TestWords:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({}, "The round trip limits"),
            ({"cloud_ms": 200.0}, "The cloud's computing limits"),
            ({"device_ms": 200.0}, "This device's computing limits"),
            ({"queue_ms": 200.0}, "Waiting for other sessions"),
            ({"up_ms": 120.0, "down_ms": 90.0}, "Bandwidth limits"),
        ],
    )
    def test_the_largest_part_is_named_with_what_helps(self, changes: dict[str, float], words: str) -> None:
        parts = Parts(**{"device_ms": 5.0, "cloud_ms": 15.0, "latency_ms": 70.0, **changes})
        sample = Sample(300.0, parts, 10.0, 20.0, {"dtype": "float32"}, "float32")
        figures = LinkFigures(70.0, 1.0, None, None, 15.0)
        found = Diagnosis("ws://127.0.0.1:1", figures=figures, sample=sample)
        assert found.limit.startswith(words)
        assert found.prediction_tok_s == pytest.approx(1e3 / parts.total_ms)
