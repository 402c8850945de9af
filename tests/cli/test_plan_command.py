"""``aparte plan`` as a user sees it."""

from __future__ import annotations

from pathlib import Path

from cli.command import Command
from cli.reference import undocumented

FIELDS = {"device_gb", "cloud_gb", "bytes_per_token", "rtt_to_compute", "projections"}


def test_json_has_the_fields_that_others_build_on(aparte: Command) -> None:
    result = aparte("plan", "mistral-nemo-12b", "--cut", "2,2", "--rtt", "20,80", "--json")
    assert result.code == 0
    assert set(result.json) >= FIELDS
    assert [row["rtt_ms"] for row in result.json["projections"]] == [20, 80]
    assert set(result.json["projections"][0]) >= {"rtt_ms", "sequential_tok_s", "speculative_tok_s"}
    assert result.json["reference_rtt_ms"] == 20
    costs = {f"{name}_cost_per_million" for name in ("sequential", "speculative", "auto")}
    assert undocumented("plan", result.json, free=("printed",)) == costs, "documented as a pattern"


def test_people_get_tables_sources_and_limits(aparte: Command) -> None:
    result = aparte("plan", "mistral-7b", "--price", "1.2")
    assert result.code == 0
    assert "8 KB" in result.out
    assert "speculative, cost" in result.out
    assert "docs/privacy.md" in result.out
    assert "2.0 GB is what" in result.out
    assert "cloud_ms = 15.9 ms: paper A" in result.err


def test_options_reach_the_plan(aparte: Command, llama_folder: Path) -> None:
    words = ("--device-ms", "5", "--cloud-ms", "10", "--codec-ms", "0", "--mat", "2", "--nodes", "0")
    result = aparte("plan", llama_folder, "--rtt", "85", *words, "--context", "100", "--json")
    row = result.json["projections"][0]
    assert (row["sequential_tok_s"], row["speculative_tok_s"]) == (10.0, 20.0)
    assert result.json["bytes_per_token"] == 64


def test_mistakes_are_sentences(aparte: Command) -> None:
    for words in (("mistral-8b",), ("mistral-7b", "--rtt", "fast"), ("mistral-7b", "--dtype", "int3")):
        result = aparte("plan", *words)
        assert result.code == 2
        assert result.err.startswith("Error: ")
        assert result.out == ""
