"""Train private ends, audit them, and write the tables of docs/privacy.md about them.

    .venv/bin/python benchmarks/private_ends.py --text wikitext2_valid.txt --text …   # everything
    .venv/bin/python benchmarks/private_ends.py --text … --only default               # one setting
    .venv/bin/python benchmarks/private_ends.py --page                                # only write the page

Each setting is one ``aparte privatize`` and one ``aparte audit`` with attackers that know the defence: with
private ends of their own (trained by this script, with a secret of their own), and with leaked pairs. An
interrupted run goes on where it was if started again with the same ``--work``. What the audits found is kept
in ``benchmarks/results/private-ends.json``; the private ends themselves are secret, and are not kept.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from audit_tables import markdown

from aparte.measure.origin import commit, machine
from aparte.measure.plot_file import self_contained
from aparte.privacy.plots import frontier_plot
from aparte.report import minutes, percent

ROOT = Path(__file__).parent.parent
KEPT = Path(__file__).parent / "results" / "private-ends.json"
FULL = Path(__file__).parent / "results" / "audit.json"
PAGE = ROOT / "docs" / "privacy.md"
PLOT = ROOT / "docs" / "img" / "frontier.svg"
BEGIN, END = "<!-- private-ends:begin -->", "<!-- private-ends:end -->"
MODEL, CUT = "smollm2-135m", "2,2"

#: Options of ``aparte privatize`` by setting: a mask alone, a short and strong training, the default.
SETTINGS: dict[str, list[str]] = {
    "mask": ["--mask", "0.05", "--steps", "0"],
    "strong": ["--strength", "0.3", "--steps", "25"],
    "default": [],
}
#: Options of the attacker's own private ends. Its conversations are others, and so is its secret.
ATTACKERS = ["--strength", "0.3", "--steps", "25", "--seed", "1"]
ATTACKS = "linear,vocabulary,completion,adaptive,leaked"
LEAKED_TOKENS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", default=[], help="as for aparte audit")
    parser.add_argument("--questions", type=Path, help="as for aparte audit")
    parser.add_argument("--only", action="append", choices=list(SETTINGS))
    parser.add_argument(
        "--work", type=Path, default=Path("build/private-ends"), help="unfinished runs, secrets"
    )
    parser.add_argument("--busy", action="store_true", help="other programs ran meanwhile: say so with times")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.page:
        options.work.mkdir(parents=True, exist_ok=True)
        attackers, _ = train("attackers", ATTACKERS, options.work)
        for name in options.only or SETTINGS:
            keep(name, measure(name, attackers, options))
    write_page()


def train(name: str, arguments: list[str], work: Path) -> tuple[Path, float]:
    """The private ends called ``name``, and the seconds it took, if they were not there already."""
    file, took = work / f"{name}.safetensors", work / f"{name}.seconds"
    if not took.exists():
        print(f"{name}: training ...", flush=True)
        started = time.monotonic()
        folder = work / f"{name}-training"
        aparte("privatize", MODEL, "--cut", CUT, *arguments, "--out", file, "--work", folder)
        took.write_text(f"{time.monotonic() - started:.0f}", encoding="utf-8")
    return file, float(took.read_text(encoding="utf-8"))


def measure(name: str, attackers: Path, options: argparse.Namespace) -> dict[str, Any]:
    ends, seconds = train(name, SETTINGS[name], options.work)
    print(f"{name}: audit ...", flush=True)
    out = options.work / f"{name}-audit"
    arguments = ["--cuts", CUT, "--attacks", ATTACKS, "--attacker-tokens", LEAKED_TOKENS]
    for text in options.text:
        arguments += ["--text", text]
    if options.questions:
        arguments += ["--questions", options.questions]
    defences = f"none,private-ends={ends}"
    aparte("audit", MODEL, *arguments, "--defences", defences, "--attacker-ends", attackers, "--out", out)
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    for row in (*results["attacks"], *results["defences"]):  # where the secret lay is nobody's business
        for key in ("defence", "setting"):
            if str(row.get(key, "")).startswith("private-ends="):
                row[key] = f"private ends ({name})"
    return {
        "options": " ".join(SETTINGS[name]),
        "training_seconds": seconds,
        "busy": options.busy,
        "commit": commit(),
        "machine": machine(),
        "results": results,
    }


def aparte(*arguments: Any) -> None:
    run = subprocess.run([sys.executable, "-m", "aparte", *map(str, arguments)], check=False)
    if run.returncode:
        sys.exit(f"aparte {arguments[0]} failed.")


def keep(name: str, found: dict[str, Any]) -> None:
    KEPT.write_text(json.dumps(kept() | {name: found}, indent=0) + "\n", encoding="utf-8")


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    return {name: found[name] for name in SETTINGS if name in found}


def write_page() -> None:
    found = kept()
    if not found:
        sys.exit("Nothing was measured yet.")
    blocks = [about(found), markdown(price_table(found)), markdown(prepared_table(found)), NOTE]
    if FULL.exists():
        draw(found, json.loads(FULL.read_text(encoding="utf-8")))
        blocks.append("![Tokens recovered against loss of quality](img/frontier.svg)")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    block = "\n\n".join(blocks)
    PAGE.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}", encoding="utf-8")


def about(found: dict[str, Any]) -> str:
    one = next(iter(found.values()))
    commits = ", ".join(dict.fromkeys(run["commit"] for run in found.values()))
    busy = ", with other programs running" if any(run["busy"] for run in found.values()) else ""
    return (
        f"`{MODEL}`, cut {CUT}; {one['results']['victims']} texts attacked, from "
        f"{', '.join(one['results']['text'])}; commit {commits}; {one['machine']}{busy}."
    )


def price_table(found: dict[str, Any]) -> list[list[str]]:
    """What each costs, and what somebody finds who has the public weights and does not prepare."""
    head = (
        "`aparte privatize`|training|perplexity|same choices|same answers|`linear`|`vocabulary`|"
        "answer by `completion`"
    )
    table = [head.split("|")]
    for index, run in enumerate(found.values()):
        results = run["results"]
        if not index:
            plain = attacks(results, private=False)
            table.append(["none", "", "x 1", percent(1.0), percent(1.0), *unprepared(plain)])
        price = next(row for row in results["defences"] if private(row["setting"]))
        table.append(
            [
                shown(run),
                minutes(run["training_seconds"]),
                f"x {price['perplexity_ratio']:.4g}",
                percent(price["agreement"]),
                percent(price.get("answers_same")),
                *unprepared(attacks(results, private=True)),
            ]
        )
    return table


def prepared_table(found: dict[str, Any]) -> list[list[str]]:
    """What attackers find who know the defence, by leaked pairs."""
    rows = [row for run in found.values() for row in attacks(run["results"], private=True)]
    leaks = sorted({row["leaked"] for row in rows if row.get("leaked")})
    table = [["`aparte privatize`", "attacker", "no leak", *(f"{leak:,} leaked pairs" for leak in leaks)]]
    for run in found.values():
        mine = attacks(run["results"], private=True)
        for label, names, target in (
            ("`adaptive`: public weights and private ends of its own", ("adaptive",), "prompt"),
            ("the same, of the answer", ("adaptive",), "answer"),
            ("leaked pairs alone: `leaked_linear`, `leaked_mlp`", ("leaked_linear", "leaked_mlp"), "prompt"),
        ):
            best = [
                max(
                    (
                        row["top1"]
                        for row in mine
                        if row["name"] in names and row["target"] == target and row.get("leaked", 0) == leak
                    ),
                    default=None,
                )
                for leak in (0, *leaks)
            ]
            table.append([shown(run), label, *map(percent, best)])
    return table


def attacks(results: dict[str, Any], *, private: bool) -> list[dict[str, Any]]:
    return [row for row in results["attacks"] if str(row["defence"]).startswith("private ends") == private]


def private(setting: str) -> bool:
    return setting.startswith("private ends")


def unprepared(rows: list[dict[str, Any]]) -> list[str]:
    found = {row["name"]: row["top1"] for row in rows}
    return [percent(found.get(name)) for name in ("linear", "vocabulary", "completion")]


def shown(run: dict[str, Any]) -> str:
    return f"`{run['options']}`" if run["options"] else "its defaults (400 steps)"


def draw(found: dict[str, Any], audits: list[dict[str, Any]]) -> None:
    """One point per setting: those of the full audit at this cut, and the private ends."""
    full = next(audit for audit in audits if audit["defences"])
    rows = [row for row in full["attacks"] if row["cut"] == CUT]
    prices = [row for row in full["defences"] if row["cut"] == CUT]
    for run in found.values():
        rows += attacks(run["results"], private=True)
        prices += [row for row in run["results"]["defences"] if private(row["setting"])]
    uri = frontier_plot(rows, prices)
    svg = base64.b64decode(uri.split(",", 1)[1]).decode()
    PLOT.write_text(self_contained(svg, "Tokens recovered against loss of quality"), encoding="utf-8")


NOTE = (
    f"Prompt tokens recovered, if nothing else is said. The attacker's own private ends: `aparte privatize "
    f"{' '.join(ATTACKERS)}`. Written by `benchmarks/private_ends.py`."
)

if __name__ == "__main__":
    main()
