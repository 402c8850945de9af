"""What is said of a tunnel beside a direct port."""

from __future__ import annotations

import pytest

from aparte.measure.decomposition import Parts
from aparte.measure.doctor import Diagnosis, Sample
from aparte.measure.doctor_compare import tunnel_costs, weigh_tunnel
from aparte.measure.doctor_path import Door
from aparte.measure.link_probe import LinkFigures


def found(url: str, rtt_ms: float, mbps: float | None = None, ssh_ms: float | None = None) -> Diagnosis:
    sample = Sample(300.0, Parts(5.0, 0.0, 15.0), 10.0, 20.0, {"dtype": "float32"}, "float32")
    figures = LinkFigures(rtt_ms, 1.0, mbps, mbps, 15.0)
    return Diagnosis(url, ping_ms=[rtt_ms] * 5, ssh_ms=ssh_ms, figures=figures, sample=sample)


OPEN, TLS, HERE = Door("ws://gpu.example:7600"), Door("wss://gpu.example:7600"), Door("ws://127.0.0.1:7600")
WAY = "ssh://me@gpu.example/7600"


@pytest.mark.parametrize(
    ("door", "direct", "tunnel", "words"),
    [
        (OPEN, (80.0, 100.0), (81.0, 100.0), "is not encrypted, so take the tunnel"),
        (OPEN, (80.0, 100.0), (300.0, 100.0), "or serve with TLS and a token"),
        (TLS, (80.0, 100.0), (81.0, 100.0), "whichever is less trouble"),
        (TLS, (80.0, 100.0), (300.0, 100.0), "encrypted as well (TLS), so take that"),
        (TLS, (80.0, 100.0), (80.0, 40.0), "encrypted as well (TLS), so take that"),
        (TLS, (120.0, 100.0), (80.0, 100.0), "the shorter way; take it"),
        (HERE, (0.4, None), (1.4, 100.0), "100 Mbit/s through the tunnel, more directly"),
    ],
)
def test_advice(
    door: Door, direct: tuple[float, float | None], tunnel: tuple[float, float | None], words: str
) -> None:
    said = weigh_tunnel(found(door.url, *direct), found(WAY, *tunnel, ssh_ms=250.0), door)
    assert words in said
    assert "To set it up took 250 ms, once." in said


def test_what_it_adds_is_said_in_ms_and_as_a_share() -> None:
    direct, tunnel = found(TLS.url, 80.0, 100.0), found(WAY, 200.0, 50.0, 300.0)
    said = weigh_tunnel(direct, tunnel, TLS)
    assert (
        "80.0 ms directly, 200.0 ms through the tunnel. The tunnel adds 120.0 ms to every step, 150%." in said
    )
    assert "10.0 tok/s directly and 4.5 through the tunnel" in said
    assert tunnel_costs(direct, tunnel) == {
        "setup_ms": 300.0, "rtt_added_ms": 120.0, "up_share": 0.5, "down_share": 0.5,
        "speed_share": pytest.approx(100 / 220, abs=0.001),
    }  # fmt: skip


def test_without_one_of_them_there_is_nothing_to_say() -> None:
    direct, gone = found(TLS.url, 80.0), Diagnosis(WAY)
    assert (
        weigh_tunnel(direct, gone, TLS) == f"{WAY} could not be reached, so that there is nothing to compare."
    )
    assert tunnel_costs(direct, gone)["rtt_added_ms"] is None


def test_without_a_model_bandwidth_is_left_out() -> None:
    direct, tunnel = Diagnosis(TLS.url, ping_ms=[80.0] * 3), Diagnosis(WAY, ping_ms=[81.0] * 3, ssh_ms=200.0)
    said = weigh_tunnel(direct, tunnel, TLS)
    assert "Mbit" not in said
    assert "tok/s" not in said
