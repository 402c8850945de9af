"""``aparte bench load``: its numbers as a table and as JSON, and what cannot be measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import Command
from cli.reference import undocumented


@pytest.mark.slow
def test_a_table_and_json_and_a_plan_from_it(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    command = ("bench", "load", llama_folder, "--clients", "2,1", "--rtt", 5, "--dtype", "float32")
    command += ("--seconds", 1, "--repeats", 1, "--max-new-tokens", 8)
    result = aparte(*command, "--json")
    assert result.code == 0, result.err
    assert [row["clients"] for row in result.json["rows"]] == [2, 1]
    assert result.json["rows"][1]["ratio_to_one"] == 1.0
    assert result.json["identical"] is True
    assert result.json["link"] == {"rtt_ms": 5.0, "mbps": None}
    assert undocumented("bench load", result.json) == set()
    (tmp_path / "load.json").write_text(result.out)
    options = ("--users", 2, "--rtt", 5, "--context", 64, "--measured", tmp_path / "load.json")
    planned = aparte("plan", llama_folder, *options, "--json")
    if "about one size" not in planned.err:  # on a busy machine two devices may never meet in a pass
        assert planned.code == 0, planned.err
        assert [row["clients"] for row in planned.json["compared"]] == [1, 2]
        assert not {"compared", "simulated_tok_s"} & undocumented("plan", planned.json, free=("printed",))
        assert "what the simulation gives" in aparte("plan", llama_folder, *options).out
    table = aparte(*command)
    assert table.code == 0, table.err
    assert "ratio_to_one" in table.out
    assert "Same text in every company: yes" in table.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--clients", "one"], "not a list of numbers"),
        (["--clients", "0"], "numbers from 1 on"),
        (["--seconds", "0"], "must be positive"),
        (["--repeats", "0"], "at least 1"),
        (["--decode", "nonsense"], "nonsense"),
        (["--rtt", "-1"], "not possible"),
    ],
)
def test_mistakes(aparte: Command, llama_folder: Path, options: list[str], sentence: str) -> None:
    result = aparte("bench", "load", llama_folder, *options)
    assert result.code == 2
    assert sentence in result.err
