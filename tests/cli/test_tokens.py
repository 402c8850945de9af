"""``aparte tokens``, and a server that takes them."""

from __future__ import annotations

import signal
from pathlib import Path

from certificates import make_certificate
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
    assert aparte("tokens", "list", *file, "--json").json == {"names": ["alice", "bob"]}
    assert aparte("tokens", "revoke", "alice", *file, "--json").json == {"revoked": "alice", "names": ["bob"]}
    assert aparte("tokens", "revoke", "alice", *file).code == 2
    assert aparte("tokens", "list", "--file", tmp_path / "nothing").code == 2


def test_the_first_run_makes_a_token_and_a_line_to_copy(
    llama_folder: Path, tmp_path: Path, aparte: Command
) -> None:
    cert, key = make_certificate(tmp_path / "tls")
    child = start(
        *("serve", llama_folder, "--port", 0, "--dtype", "float32", "--tokens", tmp_path / "tokens"),
        *("--tls-cert", cert, "--tls-key", key),
    )
    assert child.stderr is not None
    lines: list[str] = []
    while not lines or "--pin" not in lines[-1]:
        lines.append(child.stderr.readline())
        assert lines[-1], lines
    (tmp_path / "token").write_text(next(line for line in lines if " " not in line.strip()))
    copied = lines[-1].partition("device: ")[2].split()
    result = aparte(
        *("generate", llama_folder, "the cat", "--max-new-tokens", 4, "--dtype", "float32", "--json"),
        *("--token-file", tmp_path / "token"),
        *copied,
    )
    assert result.code == 0, result.err
    assert result.json["new_tokens"]
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 0


def test_a_server_takes_one_kind_of_token_file(aparte: Command, tmp_path: Path) -> None:
    both = ("--tokens", tmp_path / "tokens", "--token-file", tmp_path / "token")
    result = aparte("serve", "no-model-is-even-looked-at", *both)
    assert result.code == 2
    assert "Give one of them" in result.err
