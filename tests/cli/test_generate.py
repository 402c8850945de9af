"""``aparte generate``: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from aparte.address import parse_address
from aparte.config import Cut
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from cli.command import Command, start
from running import running_server
from tiny import save_tiny

EXACT = ("--dtype", "float32", "--wire", "float32")
FIELDS = {
    *("text", "token_ids", "new_tokens", "round_trips", "mat", "tok_s", "ttft_ms"),
    *("bytes_up", "bytes_down", "decode", "cut", "finish_reason", "steps"),
}


def test_json_holds_the_agreed_fields(aparte: Command, llama_folder: Path) -> None:
    result = aparte("generate", llama_folder, "the cat", "--json", "--max-new-tokens", 8)
    assert result.code == 0
    data = result.json
    assert data.keys() >= FIELDS
    assert data["new_tokens"] == len(data["token_ids"]) <= 8
    assert data["steps"][0].keys() >= {"nodes", "accepted", "rtt_ms", "device_ms", "cloud_ms"}
    assert sum(step["accepted"] for step in data["steps"]) == data["new_tokens"]


def test_the_text_is_the_same_in_every_mode_and_in_plain_output(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat and the dog", "--max-new-tokens", 24, *EXACT)
    expected = aparte(*base, "--decode", "sequential", "--json").json
    assert expected["mat"] == 1.0
    for options in (["--decode", "jacobi"], ["--decode", "lookahead", "--ngram", "5"]):
        assert aparte(*base, *options, "--json").json["token_ids"] == expected["token_ids"]
    plain = aparte(*base)
    assert plain.out == expected["text"] + "\n"
    assert "MAT" in plain.err
    marked = aparte(*base, "--marks").out
    assert marked.count("|") - expected["text"].count("|") >= 1


def test_raw_continues_and_chat_answers(aparte: Command, llama_folder: Path) -> None:
    raw = aparte("generate", llama_folder, "the cat", "--raw", "--json", "--max-new-tokens", 4).json
    chat = aparte("generate", llama_folder, "the cat", "--json", "--max-new-tokens", 4).json
    system = aparte(
        "generate", llama_folder, "the cat", "--system", "be brief", "--json", "--max-new-tokens", 4
    ).json
    assert raw["prompt_tokens"] < chat["prompt_tokens"] < system["prompt_tokens"]


def test_a_seed_decides_sampled_text(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--temperature", 1, "--max-new-tokens", 16, "--json")
    one = aparte(*base, "--seed", 1, "--decode", "sequential").json["token_ids"]
    assert aparte(*base, "--seed", 1, "--decode", "lookahead").json["token_ids"] == one
    assert aparte(*base, "--seed", 2).json["token_ids"] != one


def test_stop_strings_end_the_answer(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--max-new-tokens", 30, *EXACT, "--json")
    whole = aparte(*base).json["text"]
    stop = whole[6:9]
    data = aparte(*base, "--stop", "never there", "--stop", stop).json
    assert data["text"] == whole[: whole.index(stop)]
    assert data["finish_reason"] == "stop"


def test_the_prompt_may_come_from_standard_input(aparte: Command, llama_folder: Path) -> None:
    base = ("--json", "--max-new-tokens", 5)
    piped = aparte("generate", llama_folder, "-", *base, stdin="käse 🙂".encode())
    assert piped.code == 0
    assert piped.json["token_ids"] == aparte("generate", llama_folder, "käse 🙂", *base).json["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["MODEL", ""], b"", "prompt is empty"),
        (["MODEL", "-"], b"  \n", "prompt is empty"),
        (["MODEL", "-"], b"caf\xe9", "not valid UTF-8"),
        (["MODEL", "hi", "--decode", "magic"], b"", "Known: auto, sequential, jacobi, lookahead"),
        (["MODEL", "hi", "--ngram", "2"], b"", "3 to 7"),
        (["MODEL", "hi", "--cut", "2"], b"", "--cut 2,2"),
        (["MODEL", "hi", "--cut", "0,2"], b"", "at least 1"),
        (["MODEL", "hi", "--cut", "5,5"], b"", "leaves nothing for the cloud"),
        (["MODEL", "hi", "--temperature", "-1"], b"", "temperature is -1"),
        (["MODEL", "hi", "--max-new-tokens", "0"], b"", "at least 1"),
        (["MODEL", "hi", "--wire", "int3"], b"", "Known: auto, float16"),
        (["MODEL", "hi", "--dtype", "int3"], b"", "Known: auto, packed16"),
        (["MODEL", "hi", "--device", "abacus"], b"", "Known: auto, cpu"),
        (["MODEL", "hi", "--stop", ""], b"", "stop string is empty"),
        (["MODEL", "hi", "--cloud", "http://127.0.0.1:1"], b"", "ws://"),
        (["MODEL", "hi", "--token-file", "/nowhere/token"], b"", "cannot be read"),
        (["MODEL", "hi", "--cloud", "wss://127.0.0.1:1", "--rtt", "5"], b"", "certificate"),
        (["no-such-model", "hi"], b"", "Unknown model"),
        (["./no/such/folder", "hi"], b"", "no file or folder"),
        (["MODEL", "hi", "--no-such-option"], b"", "No such option"),
        (["MODEL"], b"", "Missing argument"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_exit_code_2(
    aparte: Command, llama_folder: Path, arguments: list[str], stdin: bytes, sentence: str
) -> None:
    given = [str(llama_folder) if argument == "MODEL" else argument for argument in arguments]
    result = aparte("generate", *given, stdin=stdin)
    assert result.code == 2
    assert sentence in result.err
    assert result.out == ""


def test_a_prompt_longer_than_the_context_is_refused(aparte: Command, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "short", max_position_embeddings=32)
    result = aparte("generate", folder, "word " * 100)
    assert result.code == 2
    assert "the model's context 32" in result.err


@pytest.mark.parametrize("damage", ["truncated", "missing", "config"])
def test_a_damaged_model_is_named(aparte: Command, tmp_path: Path, damage: str) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    result = aparte("generate", folder, "hi")
    assert result.code == 2
    assert str(folder) in result.err


def test_no_cloud_there(aparte: Command, llama_folder: Path) -> None:
    result = aparte("generate", llama_folder, "hi", "--cloud", "ws://127.0.0.1:9")
    assert result.code == 1
    assert "aparte serve" in result.err


def test_a_cloud_with_a_token(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    with running_server(llama_folder, token="open-sesame") as (server, url):
        base = ("generate", llama_folder, "the cat", "--cloud", url, "--max-new-tokens", 6, *EXACT)
        refused = aparte(*base)
        assert refused.code == 2
        assert "--token-file" in refused.err
        token.write_text("open-sesam\n")
        assert aparte(*base, "--token-file", token).code == 2
        assert server.counters.steps == 0
        token.write_text("open-sesame\n")
        good = aparte(*base, "--token-file", token, "--json")
        assert good.code == 0
        assert "docs/privacy.md" in aparte(*base, "--token-file", token).err
        assert server.counters.steps > 0
    local = aparte("generate", llama_folder, "the cat", "--max-new-tokens", 6, *EXACT, "--json")
    assert good.json["token_ids"] == local.json["token_ids"]


def test_a_cloud_with_another_cut_is_refused_by_name(aparte: Command, llama_folder: Path) -> None:
    with running_server(llama_folder, Cut(1, 3)) as (server, url):
        result = aparte("generate", llama_folder, "hi", "--cloud", url)
        assert result.code == 2
        assert "--cut 1,3" in result.err
        assert server.counters.steps == 0


def test_a_cloud_that_goes_away_leaves_what_was_written(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--max-new-tokens", 60, "--decode", "sequential", *EXACT)
    whole = aparte(*base, "--json").json
    with running_server(llama_folder) as (_, url):
        address = parse_address(url.removeprefix("ws://"))
        with WanRelay(("127.0.0.1", 0), address, WanProfile(drop_after=12_000)) as relay:
            cloud = ("--cloud", f"ws://127.0.0.1:{relay.port}")
            result = aparte(*base, *cloud, "--retries", 0, "--json")
            plain = aparte(*base, *cloud, "--retries", 0)
            survived = aparte(*base, *cloud, "--json")  # every connection ends after so many bytes
    assert result.code == plain.code == 1
    data = result.json
    assert 0 < data["new_tokens"] < 60
    assert data["token_ids"] == whole["token_ids"][: data["new_tokens"]]
    assert data["finish_reason"] is None
    assert "went away" in data["error"]
    assert plain.out.strip()
    assert whole["text"].startswith(plain.out.rstrip("\n"))
    assert "went away" in plain.err
    assert survived.code == 0
    assert survived.json["token_ids"] == whole["token_ids"]
    assert survived.json["reconnects"] >= 1


def test_several_clouds_are_tried_in_their_order(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--max-new-tokens", 6, *EXACT, "--json")
    with running_server(llama_folder) as (server, url):
        result = aparte(*base, "--cloud", "ws://127.0.0.1:9", "--cloud", url)
        assert server.counters.steps > 0
    assert result.code == 0
    assert result.json["token_ids"] == aparte(*base).json["token_ids"]
    nobody = aparte(*base, "--cloud", "ws://127.0.0.1:9", "--cloud", "ws://127.0.0.1:10")
    assert nobody.code == 1
    assert "None of the 2 clouds can be reached" in nobody.err


def test_an_answer_may_be_given_a_time(aparte: Command, llama_folder: Path) -> None:
    result = aparte(
        *("generate", llama_folder, "the cat", "--max-new-tokens", 200, "--decode", "sequential"),
        *("--answer-timeout", 0.001, "--json"),
    )
    assert result.code == 1
    assert "--answer-timeout" in result.json["error"]
    assert result.json["finish_reason"] is None


def test_an_emulated_link_shows_in_the_records_and_is_cleaned_up(aparte: Command, llama_folder: Path) -> None:
    import subprocess

    result = aparte(
        *("generate", llama_folder, "the cat", "--rtt", 30, "--mbps", 50, "--max-new-tokens", 4),
        *("--decode", "sequential", "--json"),
    )
    assert result.code == 0
    assert all(step["rtt_ms"] >= 29 for step in result.json["steps"])
    left = subprocess.run(["pgrep", "-f", f"aparte serve {llama_folder}"], capture_output=True, check=False)
    assert left.stdout == b""


def test_ctrl_c_ends_the_answer_and_keeps_what_was_written(llama_folder: Path) -> None:
    child = start(
        *("generate", llama_folder, "the cat", "--max-new-tokens", 400, "--decode", "sequential"),
        *("--rtt", 100),
    )
    assert child.stdout is not None
    assert child.stdout.read(1)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert out.strip()
    assert "unfinished" in err
    assert "Traceback" not in err


def test_an_unexpected_failure_is_a_sentence_too(
    aparte: Command, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import aparte.device as device

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret prompt")

    monkeypatch.setattr(device, "open_writer", fail)
    result = aparte("generate", llama_folder, "hi")
    assert result.code == 1
    assert "RuntimeError" in result.err
    assert "secret" not in result.err
