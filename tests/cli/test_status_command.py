"""``aparte status``, ``--log-format`` and ``--log-level``, with a server as a process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from cli.command import Command, start


def test_a_server_is_asked_and_logs_json(aparte: Command, llama_folder: Path) -> None:
    child = start(
        *("serve", llama_folder, "--port", 0, "--json", "--dtype", "float32", "--log-format", "json"),
    )
    assert child.stdout is not None
    url = json.loads(child.stdout.readline())["listening"]
    prompt = "a secret harbour"
    answer = aparte(
        *("generate", llama_folder, prompt, "--cloud", url, "--dtype", "float32"),
        *("--max-new-tokens", 4, "--json"),
    )
    found = aparte("status", "--cloud", url, "--json")
    assert found.code == 0, found.err
    assert found.json["sessions"]["opened"] == 1
    shown = aparte("status", "--cloud", url)
    assert "round trip" in shown.out
    assert "\n  last error  none\n" in shown.out
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=20)
    events = [json.loads(line) for line in err.splitlines()]
    assert [event["event"] for event in events] == ["session_start", "session_end"]
    assert events[1]["steps"] == answer.json["round_trips"]
    assert "harbour" not in err
    assert not {str(token) for token in answer.json["token_ids"] if token > 100} & set(
        err.replace(",", " ").split()
    )


def test_mistakes(aparte: Command, llama_folder: Path) -> None:
    gone = aparte("status", "--cloud", "ws://127.0.0.1:1")
    assert gone.code == 1
    assert "cannot be reached" in gone.err
    for options, sentence in (
        (["--log-format", "xml"], "Known: text, json"),
        (["--log-level", "loud"], "Known: debug, info, warning, error"),
    ):
        result = aparte("serve", llama_folder, *options)
        assert result.code == 2
        assert sentence in result.err
