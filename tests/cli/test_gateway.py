"""``aparte gateway``: its mistakes, and one real run."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from aparte.cloud.certificate import own_certificate
from aparte.cloud.door import pin_of, tls_context
from cli.command import Command, start
from running import running_server

pytest.importorskip("uvicorn", reason="the gateway's packages are not installed")
import httpx


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_key(aparte: Command, host: str) -> None:
    result = aparte("gateway", "no-model-is-even-looked-at", "--host", host)
    assert result.code == 2
    assert "--api-key-file" in result.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--api-key", "a b"], "one ASCII key"),
        (["--api-key", "a", "--api-key-file", "b"], "Leave one of them out"),
        (["--api-key-file", "/nowhere"], "cannot be read"),
        (["--sessions", "0"], "at least 1"),
        (["--target", "local", "--cloud", "ws://127.0.0.1:1"], "no link"),
        (["--decode", "guess"], "Unknown decoding mode"),
        (["--target", "draft", "--defence", "int8"], "--defence is for --target split"),
    ],
)
def test_mistakes(aparte: Command, llama_folder: Path, options: list[str], sentence: str) -> None:
    result = aparte("gateway", llama_folder, "--port", "0", *options)
    assert result.code == 2
    assert sentence in result.err


def test_a_port_in_use_is_a_sentence(aparte: Command, llama_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = aparte("gateway", llama_folder, "--port", taken.getsockname()[1])
    assert result.code == 2
    assert "Choose another --port" in result.err


def test_another_certificate_than_the_pinned_one(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    path, _ = own_certificate(tmp_path)
    (tmp_path / "token").write_text("open-sesame")
    with running_server(llama_folder, tls=tls_context(path, path), token="open-sesame") as (_, url):
        door = ("--cloud", url, "--token-file", tmp_path / "token", "--pin", "sha256:" + "0" * 64)
        result = aparte("gateway", llama_folder, "--port", 0, *door)
    assert result.code == 2
    assert f"another certificate than the pinned one: {pin_of(path)}" in result.err


def test_it_answers_and_ends_on_a_signal(llama_folder: Path, tmp_path: Path, aparte: Command) -> None:
    (tmp_path / "key").write_text("open-sesame\n")
    asked = ("--temperature", 0.8, "--seed", 4, "--max-new-tokens", 8, "--dtype", "float32", "--json")
    expected = aparte("generate", llama_folder, "Hello", *asked).json
    with start(
        "gateway",
        llama_folder,
        "--port",
        0,
        "--api-key-file",
        tmp_path / "key",
        "--dtype",
        "float32",
        "--json",
    ) as child:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        assert ready["model"] == llama_folder.name
        body = {
            "model": ready["model"],
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0.8,
            "seed": 4,
            "max_tokens": 8,
        }
        headers = {"authorization": "Bearer open-sesame"}
        reply = httpx.post(f"{ready['base_url']}/chat/completions", json=body, headers=headers, timeout=30)
        assert reply.json()["choices"][0]["message"]["content"] == expected["text"]
        assert httpx.post(f"{ready['base_url']}/chat/completions", json=body).status_code == 401
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) in (0, -signal.SIGTERM)
        assert child.stderr is not None
        assert "Hello" not in child.stderr.read()
