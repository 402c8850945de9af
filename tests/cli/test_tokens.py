"""``aparte tokens``, and a server that takes them."""

from __future__ import annotations

import signal
import stat
import time
from pathlib import Path

import pytest

from cli.command import Command, start


def test_tokens_are_made_listed_and_revoked(aparte: Command, tmp_path: Path) -> None:
    file = ("--file", tmp_path / "tokens")
    made = aparte("tokens", "add", "alice", *file)
    assert made.code == 0
    token = made.out.strip()
    assert len(token) >= 43
    assert "cannot be shown again" in made.err
    other = aparte("tokens", "add", "bob", *file, "--json").json
    assert other["name"] == "bob"
    assert other["token"] != token
    assert aparte("tokens", "list", *file).out.split() == ["alice", "bob"]
    listed = aparte("tokens", "list", *file, "--json").json
    assert listed == {"names": ["alice", "bob"], "limits": {"alice": {}, "bob": {}}}
    assert aparte("tokens", "revoke", "alice", *file, "--json").json == {"revoked": "alice", "names": ["bob"]}
    assert aparte("tokens", "revoke", "alice", *file).code == 2
    assert aparte("tokens", "list", "--file", tmp_path / "nothing").code == 2


def test_tokens_have_limits(aparte: Command, tmp_path: Path) -> None:
    file = ("--file", tmp_path / "tokens")
    assert aparte("tokens", "add", "default", *file, "--max-sessions", 3).code == 0
    rates = ("--tokens-per-second", 50, "--bytes-per-second", "2MB", "--memory", "1GB")
    assert aparte("tokens", "add", "alice", *file, *rates).code == 0
    all_of_alice = {"tokens_per_second": 50, "bytes_per_second": 2_000_000, "kv_bytes": 10**9}
    listed = aparte("tokens", "list", *file, "--json").json
    assert listed["limits"] == {"default": {"max_sessions": 3}, "alice": all_of_alice}
    assert "alice tokens/s=50 bytes/s=2000000 memory=1000000000" in aparte("tokens", "list", *file).out
    changed = aparte("tokens", "limit", "alice", *file, "--max-sessions", 1, "--json").json
    assert changed == {"name": "alice", "limits": {"max_sessions": 1}}
    assert "no limits of its own" in aparte("tokens", "limit", "alice", *file).err
    for wrong in (("--max-sessions", 0), ("--tokens-per-second", -1), ("--memory", "much")):
        assert aparte("tokens", "add", "bob", *file, *wrong).code == 2
    assert aparte("tokens", "limit", "bob", *file).code == 2
    assert aparte("tokens", "list", *file).out.split()[:2] == ["default", "sessions=3"]


def test_the_first_run_makes_a_certificate_a_token_and_a_line_to_copy(
    llama_folder: Path, tmp_path: Path, aparte: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    child = start(
        *("serve", llama_folder, "--port", 0, "--dtype", "float32", "--tls", "auto", "--state", state)
    )
    assert child.stderr is not None
    lines: list[str] = []
    while not lines or "--pin" not in lines[-1]:
        lines.append(child.stderr.readline())
        assert lines[-1], lines
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in state.iterdir()} == {
        "tls.pem": 0o600,
        "tokens": 0o600,
    }
    given, program, command, model, *options = lines[-1].split()
    assert (program, command, model) == ("aparte", "chat", "MODEL")
    name, _, token = given.partition("=")
    assert token not in (state / "tokens").read_text()
    few = ("--max-new-tokens", 4, "--dtype", "float32", "--json")
    refused = aparte(command, llama_folder, *options, *few, stdin=b"the cat\n")
    assert refused.code == 2
    assert "refused the token" in refused.err
    monkeypatch.setenv(name, token)
    result = aparte(command, llama_folder, *options, *few, stdin=b"the cat\n")
    assert result.code == 0, result.err
    assert result.json["new_tokens"]
    monkeypatch.delenv(name)
    # A running server takes other tokens up.
    (tmp_path / "token").write_text(aparte("tokens", "add", "bob", "--file", state / "tokens").out)
    told = (*options, "--token-file", tmp_path / "token", *few, "--retries", 0)
    deadline = time.monotonic() + 20
    while (result := aparte(command, llama_folder, *told, stdin=b"the cat\n")).code:
        assert time.monotonic() < deadline, result.err
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 0


def test_a_server_takes_one_kind_of_token_file(aparte: Command, tmp_path: Path) -> None:
    both = ("--tokens", tmp_path / "tokens", "--token-file", tmp_path / "token")
    result = aparte("serve", "no-model-is-even-looked-at", *both)
    assert result.code == 2
    assert "Give one of them" in result.err
