"""docs/benchmarks.md is what benchmarks/suite.py makes of the results, with the origin of every run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1]
RESULTS = HERE / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(HERE / "benchmarks"), *sys.path])


def test_the_page_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import page

    monkeypatch.setattr(page, "PAGE", tmp_path / "benchmarks.md")
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "budget.svg").touch()
    page.write_page(RESULTS)
    assert page.PAGE.read_text(encoding="utf-8") == (HERE / "docs" / "benchmarks.md").read_text(
        encoding="utf-8"
    ), "run benchmarks/suite.py --page"


def test_every_run_has_its_origin() -> None:
    from page import read_runs
    from page_runs import runs_section

    found = read_runs(RESULTS)
    assert found
    rows = [line.split(" | ") for line in runs_section(found).splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in sorted(found)]
    for row in rows:
        assert len(row) == 7
        assert all(cell.strip(" |") for cell in row)


def entry(**result: Any) -> dict[str, Any]:
    return {"command": "aparte x", "commit": "abc", "machine": "2 cores", "result": result}


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"link": {"rtt_ms": 80.0, "mbps": None}}, "80 ms, unlimited"),
        ({"link": {"rtt_ms": None, "mbps": None}}, "none"),
        ({"link": "none"}, "none"),
        ({"links": [{"emulated_rtt_ms": 5, "emulated_mbps": 20}]}, "5 ms, 20 Mbit/s"),
        ({"links": [[5, 100]]}, "simulated: 5 ms, 100 Mbit/s"),
        ({"rows": [{"rtt_ms": 20.0, "mbps": 100.0}] * 2}, "20 ms, 100 Mbit/s"),
        ({}, "not recorded"),
    ],
)
def test_links(result: dict[str, Any], shown: str) -> None:
    from page_runs import runs_section

    line = runs_section({"one": entry(**result)}).splitlines()[-1]
    assert line.split(" | ")[-1] == f"{shown} |"


def test_the_cost_model_and_peers() -> None:
    from page_model import peers_section, rtt_section

    folds = [
        {"rtt_ms": 5, "mbps_up": 20, "max_nodes": nodes, "measured_tok_s": 10.0, "predicted_tok_s": 10.2}
        | {"error": error}
        for nodes, error in ((0, 0.02), (16, -0.04))
    ]
    costs = {"base_ms": 20.0, "cooling_ms": 3.0, "drafting_ms": 1.0, "node_ms": 0.5}
    text = rtt_section({"rtt": entry(folds=folds, median_error=0.03, worst_error=0.04, **costs)})
    assert "| 5 ms, 20 Mbit/s | 10.00 / 10.20 (+2.0%) | 10.00 / 10.20 (-4.0%) |" in text
    assert "median 3.0%, worst 4.0%" in text
    row = {"way": "transformers, generate", "prompt": "code", "tok_s": 12.0, "tokens_per_pass": 1.0}
    report = {"rows": [row | {"identical": True}], "threads": 2, "new_tokens": 96, "repeats": 3}
    text = peers_section({"peers": entry(llama_cpp={"run": False, "reason": "not on the PATH"}, **report)})
    assert "| transformers, generate | 12.0 | 1.00 | yes |" in text
    assert "llama.cpp's RPC backend was not run: not on the PATH." in text
    assert rtt_section({}) == peers_section({}) == ""


def test_steps_by_length_of_text() -> None:
    from page_parts import contexts_section

    lengths = [
        {"context": 256, "middle_ms": 10.0, "device_ms": 5.0, "over_shortest": 1.0},
        {"context": 8192, "middle_ms": 20.0, "device_ms": 10.0, "over_shortest": 2.0},
    ]
    text = contexts_section({"step": entry(contexts=lengths), "step-int8": entry()})
    assert "| `packed16` | 256 | 10.0 | 5.0 | 15.0 | 1.00x | [`step`](#runs) |" in text
    assert "| `packed16` | 8192 | 20.0 | 10.0 | 30.0 | 2.00x | [`step`](#runs) |" in text
    assert contexts_section({"step": entry()}) == contexts_section({}) == ""


def test_the_tables_of_private_ends() -> None:
    import private_ends

    def row(name: str, top1: float, defence: str = "private ends (mask)", **more: Any) -> dict[str, Any]:
        return {"name": name, "target": "prompt", "defence": defence, "top1": top1, **more}

    price = {"setting": "private ends (mask)", "perplexity_ratio": 1.25, "agreement": 0.5}
    results = {
        "attacks": [
            *(row(name, 0.9, "none") for name in ("linear", "vocabulary", "completion")),
            row("linear", 0.4),
            row("vocabulary", 0.3),
            row("completion", 0.2),
            row("adaptive", 0.7, leaked=0),
            row("adaptive", 0.8, leaked=100),
            row("leaked_linear", 0.5, leaked=100),
            row("leaked_mlp", 0.6, leaked=100),
        ],
        "defences": [{"setting": "none"}, price],
    }
    found = {"mask": {"options": "--steps 0", "training_seconds": 300.0, "results": results}}
    assert private_ends.price_table(found)[1:] == [
        ["none", "", "x 1", "100.0 %", "100.0 %", "90.0 %", "90.0 %", "90.0 %"],
        ["`--steps 0`", "5 minutes", "x 1.25", "50.0 %", "", "40.0 %", "30.0 %", "20.0 %"],
    ]
    head, adaptive, _, alone = private_ends.prepared_table(found)
    assert head[2:] == ["no leak", "100 leaked pairs"]
    assert adaptive[2:] == ["70.0 %", "80.0 %"]
    assert alone[2:] == ["", "60.0 %"]
    assert private_ends.BEGIN in private_ends.PAGE.read_text(encoding="utf-8"), "a place for them"
    assert private_ends.END in private_ends.PAGE.read_text(encoding="utf-8")
