"""``aparte doctor`` as a user sees it."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from cli.command import Command
from cli.reference import undocumented
from running import FLOAT32, running_server
from ssh_server import ssh_server

FIELDS = {
    "tcp_rtt_ms", "tls_ms", "ws_rtt_ms", "jitter_ms", "mbps_up", "mbps_down", "relayed", "prediction_tok_s",
    "problems",
}  # fmt: skip


def test_with_and_without_a_model(aparte: Command, llama_folder: Path) -> None:
    with running_server(llama_folder, compute=FLOAT32) as (_, url):
        bare = aparte("doctor", "--cloud", url, "--json")
        assert bare.code == 0
        assert set(bare.json) >= FIELDS
        assert bare.json["prediction_tok_s"] is None
        assert "Without a MODEL" in bare.json["notes"][0]
        words = ("--dtype", "float32", "--device", FLOAT32.device)
        report = aparte("doctor", llama_folder, "--cloud", url, *words, "--json").json
        assert report["tunnel"] is report["ssh_ms"] is None
        assert report["prediction_tok_s"] > 0
        assert undocumented("doctor", {**report, "health": {}, "step": None, "cloud": None}) == set()
        assert set(report["cloud"]) == {"dtype", "max_nodes", "max_context", "model"}
        full = aparte("doctor", llama_folder, "--cloud", url, "--compare", url, *words)
        assert full.code == 0, full.err
        assert "Relay or tunnel on the way: no." in full.out
        assert "limits speed" in full.out
        assert "Both ways take the same" in full.out
        assert "sequential tok/s, predicted" in full.out


def test_what_was_found_is_printed_before_the_error(aparte: Command, llama_folder: Path) -> None:
    with running_server(llama_folder, token="right") as (_, url):
        result = aparte("doctor", "--cloud", url, "--json")
        assert result.code == 2
        assert result.json["tcp_rtt_ms"] is not None
        assert "refused the token" in result.json["problems"][0]
        assert "refused the token" in result.err
    gone = aparte("doctor", "--cloud", url)
    assert gone.code == 1
    assert "cannot be reached" in gone.err
    assert aparte("doctor", "--cloud", "nowhere").code == 2
    assert aparte("doctor").code == 2


def test_a_tunnel_beside_the_direct_port(
    aparte: Command, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (llama_folder, "--dtype", "float32", "--device", FLOAT32.device)
    with running_server(llama_folder, compute=FLOAT32) as (_, url), ssh_server(tmp_path / "ssh") as sshd:
        monkeypatch.setenv("HOME", str(sshd.home))
        account = f"{getpass.getuser()}@127.0.0.1:{sshd.port}"
        result = aparte("doctor", *words, "--cloud", url, "--ssh", account, "--json")
        assert result.code == 0, result.err
        report = result.json
        tunnel, way = report["tunnel"], report["compared"]
        assert way["url"] == f"ssh://{account}/{url.rpartition(':')[2]}"
        assert way["problems"] == []
        assert tunnel["setup_ms"] == way["ssh_ms"] > 0
        assert tunnel["rtt_added_ms"] == pytest.approx(way["ws_rtt_ms"] - report["ws_rtt_ms"], abs=0.01)
        assert tunnel["speed_share"] == pytest.approx(
            way["prediction_tok_s"] / report["prediction_tok_s"], rel=0.01
        )
        for part in (
            "ms directly",
            "through the tunnel",
            "To set it up took",
            "tok/s directly",
            "this machine",
        ):
            assert part in report["comparison"]
        assert undocumented("doctor", {"tunnel": tunnel, **tunnel}) == set()
        closed = aparte("doctor", "--cloud", url, "--ssh", f"ssh://{account}/1")
        assert closed.code == 0
        assert "nothing listens there on 127.0.0.1:1" in closed.out
        assert "nothing to compare" in closed.out
        twice = aparte("doctor", "--cloud", way["url"], "--ssh", account)
        assert twice.code == 2
        assert "leads through SSH already" in twice.err
        assert aparte("doctor", "--cloud", url, "--ssh", account, "--compare", url).code == 2


def test_what_cannot_be_emulated(aparte: Command, llama_folder: Path) -> None:
    for words in (
        (),
        ("--emulate", "80"),
        (llama_folder, "--emulate", "80", "--cloud", "ws://127.0.0.1:1"),
        (llama_folder, "--emulate", "80", "--compare", "ws://127.0.0.1:1"),
        (llama_folder, "--emulate", "fast"),
        (llama_folder, "--emulate", "1,2,3"),
    ):
        result = aparte("doctor", *words)
        assert result.code == 2, words
        assert "Error: " in result.err


@pytest.mark.slow
def test_emulated_paths_are_told_apart(aparte: Command, llama_folder: Path) -> None:
    words = ("--dtype", "float32", "--device", FLOAT32.device, "--emulate", "60,15+60")
    result = aparte("doctor", llama_folder, *words, "--json")
    assert result.code == 0, result.err
    report = result.json
    assert (report["relayed"], report["compared"]["relayed"]) == (False, True)
    assert report["emulated"] == "60,15+60"
    assert report["prediction_tok_s"] > 0
    assert report["comparison"].startswith(f"{report['url']} is ")
