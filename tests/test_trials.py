"""Short versions of the trials in ``benchmarks/``, and the tables that are made of their results."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import floor
import fuzz
import jitter
import operations
import pytest
import slab
import soak

from running import running_server

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_answers_over_a_bad_link_are_those_of_a_good_one(llama_folder: Path) -> None:
    """Two seconds of what ``benchmarks/jitter.py`` does for 60, with ten times as many resets."""
    options = Namespace(
        model=str(llama_folder),
        dtype="float32",
        seconds=2.0,
        clients=1,
        answers=4,
        max_new_tokens=8,
        resets=0.1,
        stalls=0.02,
        seed=1,
    )
    with running_server(llama_folder, name=str(llama_folder)) as (_, url):
        report = jitter.measure(options, SimpleNamespace(url=url, port=int(url.rpartition(":")[2])))
    assert report["failed"] == 0
    assert report["identical"] == report["answers"] > 0
    assert report["resets"] > 0


def test_a_step_against_the_speed_of_memory() -> None:
    """A small model of what ``benchmarks/floor.py`` does for one of 7B on a GPU."""
    options = Namespace(
        device="cpu",
        layers=5,
        ends=1,
        width=64,
        head_dim=16,
        context=20,
        nodes=[1, 8],
        repeats=3,
        copied=1 << 20,
    )
    report = floor.measure(options)
    assert report["layers"] == "3 of 5, width 64"
    # Attention's four matrices, feed-forward's three, two norms; bfloat16.
    assert report["weights_gb"] == pytest.approx(3 * 2 * (4 * 64**2 + 3 * 64 * 172 + 2 * 64) / 1e9)
    assert [row["nodes"] for row in report["rows"]] == [1, 8]
    assert all(row["step_ms"] > report["floor_ms"] > 0 for row in report["rows"])
    assert report["rows"][0]["tok_s"]["80"] < 1000 / 80


def run(script: str, *options: object) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_buffers_that_are_handed_on_and_pages() -> None:
    """A few sessions of what ``benchmarks/slab.py`` does for 400."""
    options = Namespace(sessions=6, alive=2, seed=1)
    kept, freed = (slab.sessions(kind, options) for kind in ("slab", "mapped"))
    assert kept["peak_mb"] >= freed["peak_mb"] > 0
    found = slab.pages(64, 1)
    assert found["side_by_side_ms"] > 0
    assert found["pages_ms"] > 0


@pytest.mark.slow
def test_kills(llama_folder: Path) -> None:
    options = ("--kills", 2, "--answers", 4, "--max-new-tokens", 16, "--gap", 0.3)
    found = run("kills.py", "--model", llama_folder, *options)
    assert found["kills"] == 2
    assert found["identical"] == found["answers"] > 0


@pytest.mark.slow
def test_fuzz(llama_folder: Path) -> None:
    found = run("fuzz.py", "--model", llama_folder, "--messages", 2000, "--kv-memory", "20MB")
    assert found["messages"] >= 1000
    assert found["internal_errors"] == 0
    assert found["kv_bytes"]["after"] == 0


@pytest.mark.slow
def test_soak(llama_folder: Path) -> None:
    """Too short to say anything about leaks, long enough to see that it runs."""
    command = ("--model", llama_folder, "--minutes", 0.2, "--clients", 2, "--rtt", 5, "--max-new-tokens", 8)
    script = [sys.executable, str(BENCHMARKS / "soak.py"), *map(str, command), "--json"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=280, check=False)
    found = json.loads(done.stdout)
    assert found["answers"] > 2
    assert found["flat"] == (done.returncode == 0)


@pytest.mark.parametrize(
    ("last", "flat"), [(1000, True), (1019, True), (1021, False), (979, False)], ids=lambda value: str(value)
)
def test_what_is_flat(last: int, flat: bool) -> None:
    samples = [(0.0, 500), (5.0, 900)] + [(10.0 + at, 1000) for at in range(45)]
    samples += [(55.0 + at, last) for at in range(45)]
    report = soak.report_of([(at, size * 1000) for at, size in samples], 100.0)
    assert report["flat"] is flat
    assert report["growth"] == pytest.approx(last / 1000 - 1, abs=1e-4)


def test_a_peak_in_between_is_not_flat() -> None:
    samples = [(float(at), 1_000_000 + (30_000 if at == 50 else 0)) for at in range(100)]
    report = soak.report_of(samples, 100.0)
    assert report["growth"] == 0
    assert report["flat"] is False


def test_the_fuzzers_verdict_sees_every_kind_of_failure() -> None:
    good: dict[str, Any] = {
        "alive": True,
        "internal_errors": 0,
        "other_session": {"answers": 3, "identical": 3, "failure": ""},
        "sessions_left": 0,
        "kv_bytes": {"budget": 10, "most": 10, "after": 0},
        "resident_mb": {"after_a_fifth": 500.0, "most": 510.0},
    }
    assert fuzz.passed(good)
    bad: list[dict[str, Any]] = [
        {"alive": False},
        {"internal_errors": 1},
        {"other_session": {"answers": 3, "identical": 2, "failure": ""}},
        {"other_session": {"answers": 0, "identical": 0, "failure": ""}},
        {"other_session": {"answers": 3, "identical": 3, "failure": "gone"}},
        {"sessions_left": 1},
        {"kv_bytes": {"budget": 10, "most": 11, "after": 0}},
        {"kv_bytes": {"budget": 10, "most": 10, "after": 1}},
        {"resident_mb": {"after_a_fifth": 500.0, "most": 700.0}},
    ]
    for change in bad:
        assert not fuzz.passed(good | change), change


RESULTS: dict[str, dict[str, Any]] = {
    "load": {
        "rows": [
            {
                "clients": 8,
                "tok_s": 40.0,
                "ratio_to_one": 3.1,
                "step_p50_ms": 150.0,
                "step_p95_ms": 200.0,
                "queue_p50_ms": 10.0,
                "queue_p95_ms": None,
                "cloud_p50_ms": 30.0,
                "cloud_p95_ms": 44.0,
            }
        ],
        "link": {"rtt_ms": 80.0},
        "decode": "sequential",
        "max_new_tokens": 64,
        "repeats": 2,
        "seconds": 10.0,
        "identical": True,
    },
    "loopback": {"rows": [{"tok_s": 27.0}], "unsplit_tok_s": 30.0, "one_to_unsplit": 0.9},
    "kills": {"kills": 100, "answers": 222, "identical": 222, "lost_in_an_answer": 90},
    "jitter": {
        "seconds": 61.0,
        "clients": 3,
        "stalls": 7,
        "resets": 9,
        "failed": 0,
        "identical": 44,
        "answers": 44,
    },
    "fuzz": {
        "messages": 100_000,
        "seconds": 90.0,
        "alive": True,
        "internal_errors": 0,
        "other_session": {"identical": 55, "answers": 55},
        "kv_bytes": {"most": 1e8, "budget": 2e8, "after": 0},
        "resident_mb": {"after_a_fifth": 600.0, "end": 601.0},
    },
    "soak": {
        "minutes": 10.0,
        "clients": 8,
        "answers": 333,
        "growth": 0.001,
        "spread": 0.005,
        "resident_mb": {"by_tenth": [500.0, 501.0]},
    },
    "slab": {
        "sessions": 400,
        "alive": 16,
        "repeats": 3,
        "buffers": {
            kind: {
                "ms_per_session": ms,
                "faults_per_session": 10.0,
                "resident_most_mb": 700.0,
                "resident_all_ended_mb": 690.0,
                "resident_trimmed_mb": 3.0,
            }
            for kind, ms in (("slab", 12.5), ("mapped", 25.0))
        },
        "pages": [{"context": 256, "side_by_side_ms": 1.5, "pages_ms": 3.0}],
    },
}


def test_tables_go_between_their_marks(tmp_path: Path) -> None:
    for name, result in RESULTS.items():
        entry = {"command": name, "commit": "abc", "machine": "2 cores", "result": result}
        (tmp_path / f"{name}.json").write_text(json.dumps(entry), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{operations.BEGIN}\nold\n{operations.END}\nafter\n", encoding="utf-8")
    operations.write_page(page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{operations.BEGIN}\n")
    assert text.endswith(f"{operations.END}\nafter\n")
    assert "old" not in text
    for told in (
        "| 8 | 40.0 | 3.10x | 150 ms |",
        "90% of the 30.0",
        "222 of 222",
        "100,000",
        "44 of 44",
        "+0.10%",
        "| handed on | 12.5 ms | 10 | 700 MB | 690 MB | 3 MB |",
        "| 256 | 1.50 ms | 3.00 ms | 2.0x |",
    ):
        assert told in text
    operations.write_page(page, tmp_path)
    assert page.read_text(encoding="utf-8") == text


def test_a_page_without_results_has_no_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{operations.BEGIN}\nold\n{operations.END}\n", encoding="utf-8")
    operations.write_page(page, tmp_path / "none")
    assert page.read_text(encoding="utf-8") == f"{operations.BEGIN}\n\n\n{operations.END}\n"


def test_the_page_is_what_its_results_say(tmp_path: Path) -> None:
    copy = tmp_path / "operations.md"
    copy.write_text(operations.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    operations.write_page(copy)
    assert copy.read_text(encoding="utf-8") == operations.PAGE.read_text(encoding="utf-8")
