"""Run the measurements of docs/benchmarks.md and write that page.

    .venv/bin/python benchmarks/suite.py --data spec_bench.jsonl                # everything
    .venv/bin/python benchmarks/suite.py --data spec_bench.jsonl --only link-80 # one of them
    .venv/bin/python benchmarks/suite.py --page                                 # only write the page

Each measurement is a command of ``aparte`` or of this folder; its JSON goes to ``benchmarks/results``
with the command, the commit and the machine. Spec-Bench is not part of the project: ``--data`` names its
480 questions as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from page import write_page

from aparte.measure.origin import commit, machine

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FREE = "context+recycling+runner-up"
SPECBENCH = ["bench", "specbench", "smollm2-135m", "--max-new-tokens", "128"]
LINK = ["--mbps", "100"]

#: Arguments of ``aparte`` by measurement; questions by default.
MEASUREMENTS: dict[str, tuple[list[str], int]] = {
    "free-16": ([*SPECBENCH, "--decode", FREE, "--max-nodes", "16", "--no-baseline"], 48),
    "free-32-warm": ([*SPECBENCH, "--decode", FREE, "--max-nodes", "32", "--warm", "--no-baseline"], 48),
    "common-16": ([*SPECBENCH, "--decode", f"{FREE}+common", "--max-nodes", "16", "--no-baseline"], 48),
    "bridge-24": (
        [*SPECBENCH, "--max-nodes", "24", "--in-flight", "1", "--rtt", "80", *LINK, "--no-baseline"],
        12,
    ),
    "link-80": ([*SPECBENCH, "--rtt", "80", *LINK], 12),
    "link-80-single": ([*SPECBENCH, "--rtt", "80", *LINK, "--in-flight", "1"], 12),
    "link-150": ([*SPECBENCH, "--rtt", "150", *LINK], 12),
    "budget": (
        ["bench", "budget", "smollm2-135m", "--max-new-tokens", "48", "--plot", "docs/img/budget.svg"],
        12,
    ),
    "rtt": (["rtt", "smollm2-135m", "--emulate", "5,20,40,80,150x20,100,1000"], 0),
    "step": (["bench", "step", "smollm2-135m"], 0),
    "step-int8": (["bench", "step", "smollm2-135m", "--dtype", "int8"], 0),
    "step-bf16": (["bench", "step", "smollm2-135m", "--dtype", "bfloat16"], 0),
    "step-invariant": (["bench", "step", "smollm2-135m", "--batch-invariant"], 0),
    "step-int8-invariant": (
        ["bench", "step", "smollm2-135m", "--dtype", "int8", "--batch-invariant"],
        0,
    ),
    "step-bf16-invariant": (
        ["bench", "step", "smollm2-135m", "--dtype", "bfloat16", "--batch-invariant"],
        0,
    ),
    "step-kv8": (["bench", "step", "smollm2-135m", "--kv", "int8"], 0),
    "step-int8-kv8": (["bench", "step", "smollm2-135m", "--dtype", "int8", "--kv", "int8"], 0),
    "memory": (
        [
            "bench",
            "memory",
            "smollm2-135m",
            *(f"--dtype={name}" for name in ("packed16", "int8", "bfloat16")),
        ],
        0,
    ),
    "spade": (
        ["bench", "spade", "smollm2-135m", "--max-new-tokens", "96", "--plot", "docs/img/spade.svg"],
        12,
    ),
    "spade-chain": (
        [
            "bench",
            "spade",
            "smollm2-135m",
            "--max-new-tokens",
            "96",
            "--shape",
            "chain",
            "--d",
            "1,2,4,6,8,12",
        ],
        12,
    ),
}
for name, lengths, more in (
    ("spade-int8", "2,4,8,16,auto", ["--dtype", "int8"]),
    # With the pending token these are up to sixteen rows, as many as weights are laid out for.
    ("spade-bf16", "3,7,11,15,auto", ["--dtype", "bfloat16"]),
    (
        "spade-bf16-invariant",
        "3,7,11,15,auto",
        ["--dtype", "bfloat16", "--batch-invariant", "--colocated", "none", "--no-scores"],
    ),
    ("spade-drawn", "2,4,8,16,auto", ["--temperature", "0.8", "--accept", "rejection"]),
):
    arguments = ["bench", "spade", "smollm2-135m", "--max-new-tokens", "96", "--in-flight", "1"]
    MEASUREMENTS[name] = ([*arguments, "--d", lengths, *more], 12)
#: Measurements that have a script of their own in this folder.
SCRIPTS = ("links", "peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="Spec-Bench questions")
    parser.add_argument("--only", action="append", choices=[*MEASUREMENTS, *SCRIPTS])
    parser.add_argument("--limit", type=int, help="questions, instead of each measurement's own number")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.page:
        for name in options.only or [*MEASUREMENTS, *SCRIPTS]:
            print(f"{name} ...", flush=True)
            measure(name, options.data, options.limit)
    write_page(RESULTS)


def measure(name: str, data: Path | None, limit: int | None) -> None:
    """Run one measurement and keep what it printed."""
    if name in SCRIPTS:
        command = [sys.executable, str(HERE / f"{name}.py"), "--json"]
        shown = [f"benchmarks/{name}.py"]
    else:
        arguments, questions = MEASUREMENTS[name]
        if questions:
            if data is None:
                sys.exit(f"{name} needs --data, the Spec-Bench questions.")
            arguments = [*arguments, "--data", str(data), "--limit", str(limit or questions)]
        command = [sys.executable, "-m", "aparte", *arguments, "--json"]
        shown = ["aparte", *(data.name if data and part == str(data) else part for part in arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{name} failed:\n{run.stderr[-2000:]}")
    result = {
        "command": " ".join(shown),
        "commit": commit(),
        "machine": machine(),
        "result": json.loads(run.stdout),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
