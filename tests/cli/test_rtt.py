"""``aparte rtt`` as a user sees it."""

from __future__ import annotations

from pathlib import Path

from cli.command import Command
from cli.reference import undocumented
from running import FLOAT32, running_server

FIELDS = {"rtt_ms", "mbps_up", "mbps_down", "median_error", "worst_error", "folds", "projections"}
FEW = ("--max-nodes", "0,4", "--max-new-tokens", "10", "--repeats", "1", "--dtype", "float32")


def test_emulated_links_are_fitted_and_validated(aparte: Command, llama_folder: Path) -> None:
    result = aparte(
        "rtt", llama_folder, "--emulate", "10,30x5", *FEW, "--prompts", "1", "--project", "50x5", "--json"
    )
    assert result.code == 0, result.err
    assert set(result.json) >= FIELDS
    assert undocumented("rtt", result.json, free=("acceptance", "parts")) == set()
    assert [link["emulated_rtt_ms"] for link in result.json["links"]] == [10, 30]
    assert len(result.json["folds"]) == 4
    assert [(row["rtt_ms"], row["mbps"], row["max_nodes"]) for row in result.json["projections"]] == [
        (50, 5, 0),
        (50, 5, 4),
    ]


def test_a_cloud_that_is_there(aparte: Command, llama_folder: Path) -> None:
    with running_server(llama_folder, compute=FLOAT32, token="open") as (_, url):
        token = llama_folder.parent / "rtt-token"
        token.write_text("open", encoding="utf-8")
        words = ("rtt", llama_folder, "--cloud", url, "--token-file", token)
        result = aparte(*words, *FEW, "--device", FLOAT32.device)
        assert result.code == 0, result.err
        assert "Cross-validation" in result.out
        assert "Projected tok/s" in result.out
        assert "A step: round trip" in result.err
        refused = aparte("rtt", llama_folder, "--cloud", url, *FEW)
        assert refused.code == 2
        assert "refused the token" in refused.err


def test_mistakes_are_sentences(aparte: Command, llama_folder: Path) -> None:
    for words in (
        ("--cloud", "ws://127.0.0.1:1", "--emulate", "5x5"),
        ("--emulate", "fast"),
        ("--max-nodes", "many"),
        ("--decode", "bridge", "--cloud", "ws://127.0.0.1:1"),
        ("--cuts", "3,3", "--cloud", "ws://127.0.0.1:1"),
    ):
        result = aparte("rtt", llama_folder, *words)
        assert result.code == 2, words
        assert "Error: " in result.err
    gone = aparte("rtt", llama_folder, "--cloud", "ws://127.0.0.1:1")
    assert gone.code == 1
    assert "cannot be reached" in gone.err
