"""``aparte serve``: the door, and a clean start and end."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from aparte.cloud.door import pin_of
from certificates import make_certificate
from cli.command import Command, start


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_machines_are_not_let_in_by_accident(aparte: Command, host: str) -> None:
    began = time.monotonic()
    result = aparte("serve", "no-model-is-even-looked-at", "--host", host)
    assert result.code == 2
    assert "--insecure" in result.err
    assert "--token-file and --tls-cert are missing" in result.err
    assert time.monotonic() - began < 5


def test_a_token_alone_is_not_enough(aparte: Command, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc")
    result = aparte("serve", "x", "--host", "0.0.0.0", "--token-file", tmp_path / "token")
    assert result.code == 2
    assert "--tls-cert is missing" in result.err


def test_a_port_in_use_is_a_sentence(aparte: Command, llama_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = aparte("serve", llama_folder, "--port", taken.getsockname()[1])
    assert result.code == 2
    assert "Choose another --port" in result.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cut", "4,4"], "leaves nothing for the cloud"),
        (["--tls-cert", "/nowhere.pem"], "both --tls-cert and --tls-key"),
        (["--idle", "0"], "must be positive"),
        (["--inner-cuts", "--whole"], "has no use with --whole"),
        (["--port", "70000"], "--port"),
        (["--kv-memory", "2TB"], "not an amount of memory"),
        (["--session-memory", "much"], "not an amount of memory"),
        (["--tls", "maybe"], "Known: auto"),
        (["--state", "somewhere"], "Give --tls auto"),
        (["--tls", "auto", "--tls-cert", "c.pem", "--tls-key", "k.pem"], "Leave one of them out"),
    ],
)
def test_mistakes(aparte: Command, llama_folder: Path, options: list[str], sentence: str) -> None:
    result = aparte("serve", llama_folder, *options)
    assert result.code == 2
    assert sentence in result.err


def test_serves_over_tls_and_ends_on_a_signal(llama_folder: Path, tmp_path: Path, aparte: Command) -> None:
    cert, key = make_certificate(tmp_path)
    (tmp_path / "token").write_text("open-sesame")
    door = ("--token-file", tmp_path / "token")
    child = start(
        *("serve", llama_folder, "--port", 0, "--json", "--dtype", "float32", *door),
        *("--tls-cert", cert, "--tls-key", key),
    )
    assert child.stdout is not None
    ready = json.loads(child.stdout.readline())
    assert ready["listening"].startswith("wss://127.0.0.1:")
    assert ready["cut"] == "2,2"
    assert ready["pin"] == pin_of(cert)
    base = ("generate", llama_folder, "the cat", "--cloud", ready["listening"], "--dtype", "float32", *door)
    assert aparte(*base, "--max-new-tokens", 4).code == 2  # our own certificate is not trusted yet
    good = aparte(*base, "--max-new-tokens", 4, "--tls-ca", cert, "--json")
    assert good.code == 0
    assert good.json["new_tokens"]
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 0
    assert "Traceback" not in err
    assert "open-sesame" not in err
