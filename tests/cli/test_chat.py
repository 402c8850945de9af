"""``aparte chat``: turns, reuse of what the cloud holds, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from aparte.config import ServerLimits
from cli.command import Command, start
from running import running_server

EXACT = ("--dtype", "float32", "--wire", "float32")


def test_a_follow_up_sends_only_what_is_new(aparte: Command, llama_folder: Path) -> None:
    with running_server(llama_folder) as (server, url):
        result = aparte(
            *("chat", llama_folder, "--cloud", url, "--json", "--max-new-tokens", 8, *EXACT),
            stdin=b"the cat sat\nand the dog\n\n/help\n/exit\nnever read\n",
        )
        assert server.counters.sessions_opened == 1
    assert result.code == 0
    first, second = (json.loads(line) for line in result.out.splitlines())
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] >= first["prompt_tokens"]
    sent = second["steps"][0]["nodes"] - second["steps"][0]["drafted"]
    assert sent == second["prompt_tokens"] - second["reused_tokens"]


def test_reset_starts_a_new_conversation(aparte: Command, llama_folder: Path) -> None:
    result = aparte(
        *("chat", llama_folder, "--json", "--max-new-tokens", 8, "--system", "be kind", *EXACT),
        stdin=b"the cat\n/reset\nthe cat\n",
    )
    first, second = (json.loads(line) for line in result.out.splitlines())
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert first["token_ids"] == second["token_ids"]


def test_an_expired_session_is_opened_again(llama_folder: Path) -> None:
    with running_server(llama_folder, limits=ServerLimits(idle_s=2.5)) as (server, url):
        child = start("chat", llama_folder, "--cloud", url, "--json", "--max-new-tokens", 6, *EXACT)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("the cat\n")
        child.stdin.flush()
        first = json.loads(child.stdout.readline())
        deadline = time.monotonic() + 10
        while server.session_count and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.cache_bytes == 0
        child.stdin.write("the dog\n")
        child.stdin.flush()
        second = json.loads(child.stdout.readline())
        child.communicate(timeout=20)
        assert child.returncode == 0
        assert server.counters.sessions_opened == 2
    assert first["new_tokens"]
    assert second["new_tokens"]
    assert second["reused_tokens"] == 0
    assert "error" not in second


def test_ctrl_c_stops_the_answer_and_not_the_program(llama_folder: Path) -> None:
    child = start(
        *("chat", llama_folder, "--max-new-tokens", 40, "--decode", "sequential", "--stats"),
        *("--rtt", 60),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("the cat\n")
    child.stdin.flush()
    assert child.stdout.read(1)  # the answer has begun; 40 round trips take over two seconds
    child.send_signal(signal.SIGINT)
    _, err = child.communicate("and the dog\n", timeout=60)
    assert child.returncode == 0
    stopped, whole = (line for line in err.splitlines() if "round trips" in line)
    assert stopped.endswith("unfinished")
    assert not whole.endswith("unfinished")
    assert "Traceback" not in err


def test_the_cloud_goes_away_between_turns(aparte: Command, llama_folder: Path) -> None:
    result = aparte("chat", llama_folder, "--cloud", "ws://127.0.0.1:9", stdin=b"hello\n")
    assert result.code == 1
    assert "cannot be reached" in result.err


def test_a_line_that_is_not_utf8(aparte: Command, llama_folder: Path) -> None:
    result = aparte("chat", llama_folder, stdin=b"caf\xe9\n")
    assert result.code == 2
    assert "UTF-8" in result.err
