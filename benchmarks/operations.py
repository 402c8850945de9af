"""Run the measurements of docs/operations.md and write their tables into it.

    .venv/bin/python benchmarks/operations.py                    # everything; an hour or so
    .venv/bin/python benchmarks/operations.py --only load        # one of them
    .venv/bin/python benchmarks/operations.py --only soak --more "--minutes 2"
    .venv/bin/python benchmarks/operations.py --page             # only write the tables

Each is a command of its own; its JSON goes to ``benchmarks/results/cloud`` with the command, the commit and
the machine. The tables go between two marks in the page; what stands there by hand is left alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aparte.measure.origin import commit, machine

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "operations.md"
RESULTS = HERE / "results" / "cloud"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

#: Command by measurement. ``aparte`` is the command line of this project.
MEASUREMENTS: dict[str, list[str]] = {
    "load": ["aparte", "bench", "load", "smollm2-135m"],
    "loopback": [
        *("aparte", "bench", "load", "smollm2-135m", "--clients", "1", "--rtt", "0", "--unsplit"),
        *("--repeats", "4"),
    ],
    "kills": ["benchmarks/kills.py"],
    "fuzz": ["benchmarks/fuzz.py"],
    "jitter": ["benchmarks/jitter.py"],
    "soak": ["benchmarks/soak.py"],
    "slab": ["benchmarks/slab.py"],
}


#: Columns of the table of ``bench load``.
TIMES = ("step_p50_ms", "step_p95_ms", "queue_p50_ms", "queue_p95_ms", "cloud_p50_ms", "cloud_p95_ms")


def measure(name: str, more: list[str]) -> None:
    """Run one measurement and keep what it printed, whether or not it is what was hoped for."""
    words = [*MEASUREMENTS[name], *more]
    run = [sys.executable, "-m", "aparte", *words[1:]] if words[0] == "aparte" else [sys.executable, *words]
    done = subprocess.run([*run, "--json"], stdout=subprocess.PIPE, text=True, check=False, cwd=HERE.parent)
    if not done.stdout.strip():
        sys.exit(f"{name} ended with code {done.returncode} and without a result.")
    # Of a model's folder the name is enough, and says nothing of this machine.
    named = [Path(word).name if Path(word).is_absolute() else word for word in words]
    shown = named if words[0] == "aparte" else ["python", *named]
    made = {"commit": commit(), "machine": machine()}
    result = {"command": shlex.join(shown), **made, "result": json.loads(done.stdout)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write_page(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Replace what stands between the marks. Measurements that are missing have no rows."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*.json")}
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    parts = [section(found) for section in (_load, _loopback, _trials, _soak, _slab, _origins)]
    page.write_text(
        f"{before}{BEGIN}\n\n" + "\n".join(part for part in parts if part) + f"\n{END}{after}",
        encoding="utf-8",
    )


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _load(found: dict[str, Any]) -> str:
    if "load" not in found:
        return ""
    result = found["load"]["result"]
    columns = [
        *("devices", "tok/s together", "of one device", "step, p50", "step, p95"),
        *("queue, p50", "queue, p95", "forward pass, p50", "p95"),
    ]
    rows = [
        [
            str(row["clients"]),
            f"{row['tok_s']:.1f}",
            "-" if row["ratio_to_one"] is None else f"{row['ratio_to_one']:.2f}x",
            *("-" if row[name] is None else f"{row[name]:.0f} ms" for name in TIMES),
        ]
        for row in result["rows"]
    ]
    return (
        f"Devices, links of {result['link']['rtt_ms']:g} ms and cloud share one machine and its cores; "
        f"{result['decode']}, {result['max_new_tokens']} tokens per answer, {result['repeats']} repeats of "
        f"{result['seconds']:g} s in alternating order. Same text in every company: "
        f"{'yes' if result['identical'] else 'no'}.\n\n" + table(columns, rows)
    )


def _loopback(found: dict[str, Any]) -> str:
    if "loopback" not in found:
        return ""
    result = found["loopback"]["result"]
    one = result["rows"][0]
    return (
        f"Without a network, one device and a cloud on loopback write {one['tok_s']:.1f} tok/s, "
        f"{result['one_to_unsplit']:.0%} of the {result['unsplit_tok_s']:.1f} tok/s of the unsplit model in "
        "one process, measured in turns.\n"
    )


def _trials(found: dict[str, Any]) -> str:
    kinds: tuple[tuple[str, Callable[[dict[str, Any]], tuple[str, str]]], ...] = (
        ("kills", _kills),
        ("jitter", _jitter),
        ("fuzz", _fuzz),
    )
    rows = [list(tell(found[name]["result"])) for name, tell in kinds if name in found]
    return table(["trial", "outcome"], rows).replace("---:", "---") if rows else ""


def _kills(result: dict[str, Any]) -> tuple[str, str]:
    return (
        f"{result['kills']} kills of the server in use, over {result['answers']} answers",
        f"{result['identical']} of {result['answers']} answers as undisturbed; "
        f"{result['lost_in_an_answer']} connections lost in the middle of one",
    )


def _jitter(result: dict[str, Any]) -> tuple[str, str]:
    return (
        f"{result['seconds']:.0f} s of {result['clients']} devices at 20 ms, up to 80 ms jitter each way, "
        f"{result['stalls']} stalls, {result['resets']} resets",
        f"{result['failed']} failed; {result['identical']} of {result['answers']} answers as undisturbed",
    )


def _fuzz(result: dict[str, Any]) -> tuple[str, str]:
    other, memory, kv = result["other_session"], result["resident_mb"], result["kv_bytes"]
    return (
        f"{result['messages']:,} broken messages in {result['seconds']:.0f} s",
        f"server {'up' if result['alive'] else 'down'}, {result['internal_errors']} internal errors, "
        f"{other['identical']} of {other['answers']} answers of the other session as undisturbed; caches at "
        f"most {kv['most'] / 1e6:.0f} of {kv['budget'] / 1e6:.0f} MB and {kv['after']} bytes afterwards; "
        f"memory {memory['after_a_fifth']:.0f} MB after a fifth, {memory['end']:.0f} MB at the end",
    )


def _soak(found: dict[str, Any]) -> str:
    if "soak" not in found:
        return ""
    result = found["soak"]["result"]
    memory = result["resident_mb"]
    columns = ["memory of the server, tenth of the time", *map(str, range(1, len(memory["by_tenth"]) + 1))]
    return (
        f"{result['minutes']:g} minutes with {result['clients']} devices, {result['answers']} answers in as "
        f"many sessions: after the first tenth its memory grew by {result['growth']:+.2%} and strayed "
        f"by {result['spread']:.2%}.\n\n"
        + table(columns, [["MB", *(f"{size:.0f}" for size in memory["by_tenth"])]])
    )


def _slab(found: dict[str, Any]) -> str:
    if "slab" not in found:
        return ""
    result = found["slab"]["result"]
    columns = [
        *("buffers", "processor time per session", "page faults per session", "resident, most"),
        *("all ended", "tidied up"),
    ]
    rows = [
        [
            {"slab": "handed on", "mapped": "mapped each time", "heap": "from the C library"}[kind],
            f"{run['ms_per_session']:.1f} ms",
            f"{run['faults_per_session']:.0f}",
            *(f"{run[f'resident_{name}_mb']:.0f} MB" for name in ("most", "all_ended", "trimmed")),
        ]
        for kind, run in result["buffers"].items()
    ]
    pages = [
        [
            f"{row['context']}",
            f"{row['side_by_side_ms']:.2f} ms",
            f"{row['pages_ms']:.2f} ms",
            f"{row['pages_ms'] / row['side_by_side_ms']:.1f}x",
        ]
        for row in result["pages"]
    ]
    return (
        f"[Memory for sessions](architecture.md#memory): {result['sessions']} sessions of mixed lengths, "
        f"{result['alive']} at a time, that only store rows in caches of the default model's middle; median "
        f"of {result['repeats']} processes each, in turns.\n\n"
        + table(columns, rows)
        + "\nAttention of one node in its 26 layers over rows that lie side by side and over pages of 16 "
        "rows that are gathered first; processor time of one thread.\n\n"
        + table(["rows", "side by side", "pages", "ratio"], pages)
    )


def _origins(found: dict[str, Any]) -> str:
    rows = [
        [f"`{entry['command']}`", entry["commit"], entry["machine"]] for _, entry in sorted(found.items())
    ]
    return table(["command", "commit", "machine"], rows).replace("---:", "---") if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(MEASUREMENTS))
    parser.add_argument("--more", default="", help="further options of that measurement")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.more and len(options.only or ()) != 1:
        parser.error("--more belongs to one measurement; name it with --only")
    if not options.page:
        for name in options.only or MEASUREMENTS:
            print(f"{name} ...", flush=True)
            measure(name, shlex.split(options.more))
    write_page()


if __name__ == "__main__":
    main()
