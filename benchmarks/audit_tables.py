"""Write what audits found into the README and docs/privacy.md, between their markers.

    aparte audit smollm2-135m --out audit …
    .venv/bin/python benchmarks/audit_tables.py audit/results.json           # keep the figures, and write
    .venv/bin/python benchmarks/audit_tables.py --also quick/results.json    # beside the full one
    .venv/bin/python benchmarks/audit_tables.py --print                      # print what is kept
    .venv/bin/python benchmarks/audit_tables.py                              # write what is kept

The results are kept in ``benchmarks/results/audit.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aparte.privacy import traffic
from aparte.privacy.tables import (
    depth_table,
    domain_table,
    frontier_sentence,
    frontier_table,
    mlp_table,
    traffic_sentence,
)
from aparte.report import markdown_page, minutes

ROOT = Path(__file__).parent.parent
KEPT = Path(__file__).parent / "results" / "audit.json"
BEGIN, END = "<!-- audit:begin -->", "<!-- audit:end -->"


def about(results: dict[str, Any]) -> str:
    """What was measured, on what, and by which command."""
    kind = "a quick" if results["quick"] else "a full"
    missing = results.get("unfinished", 0)
    return (
        f"`aparte audit {results['model']}`, {kind} audit: {results['layers']} layers, {results['wire']} on "
        f"the wire, computed in {results['dtype']}; {results['victims']} texts attacked, from "
        f"{', '.join(results['text'])}; {minutes(results['seconds'])}"
        + (", with other programs running." if results.get("busy") else ".")
        + (f" {missing} of its parts were not run, and are missing below." if missing else "")
    )


def readme(audits: list[dict[str, Any]]) -> str:
    """By depth, of the first audit; and of the first that has prices, every setting and its price."""
    blocks = [about(audits[0]), markdown(depth_table(audits[0]["attacks"]))]
    for results in audits:
        if table := frontier_table(results):
            if results is not audits[0]:
                blocks.append(about(results))
            blocks += [markdown(table), frontier_sentence(results), BY]
            break
    return "\n\n".join(blocks)


def privacy_page(audits: list[dict[str, Any]]) -> str:
    """Everything, audit by audit."""
    return "\n\n".join([*map(everything, audits), BY])


def everything(results: dict[str, Any]) -> str:
    """Depth, data, domains, defences, traffic: what there is."""
    rows = results["attacks"]
    told = [traffic_sentence(row) for row in rows if row["name"] == traffic.NAME]
    blocks = [about(results), "### Without a defence, by depth", markdown(depth_table(rows))]
    if table := mlp_table(rows):
        blocks += ["### The MLP inverter beside paper A's (top-1)", markdown(table)]
    if table := domain_table(rows):
        blocks += ["### The MLP in and out of domain (top-1)", markdown(table)]
    if table := frontier_table(results):
        blocks += ["### Defences and their price", markdown(table), frontier_sentence(results)]
    if told:
        blocks += ["### Traffic", *told]
    return "\n\n".join(blocks)


def markdown(table: list[list[str]]) -> str:
    return markdown_page([("table", table)]).rstrip()


BY = (
    "*Same choices*: share of the device's most probable next tokens on held-out text that are those of the "
    "undefended device; *same answers*: of whole greedy answers to questions of Spec-Bench; *bytes sent*: "
    "with rounded numbers packed, which `--defence` does not do. Written by `benchmarks/audit_tables.py`."
)


def write(page: Path, block: str) -> None:
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="results.json of one or more audits")
    parser.add_argument("--busy", action="store_true", help="other programs ran meanwhile: say so with times")
    parser.add_argument("--also", action="store_true", help="keep the full audits that are kept already")
    parser.add_argument("--print", action="store_true", dest="only_print", help="leave the pages alone")
    options = parser.parse_args()
    if options.results:
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if options.also else []
        audits = [
            *(results for results in kept if not results["quick"]),
            *(
                json.loads(file.read_text(encoding="utf-8")) | {"busy": options.busy}
                for file in options.results
            ),
        ]
    else:
        audits = json.loads(KEPT.read_text(encoding="utf-8"))
    if options.only_print:
        print(readme(audits), privacy_page(audits), sep="\n\n---\n\n")
        return
    if options.results:
        KEPT.write_text(json.dumps(audits, indent=0) + "\n", encoding="utf-8")
    write(ROOT / "README.md", readme(audits))
    write(ROOT / "docs" / "privacy.md", privacy_page(audits))


if __name__ == "__main__":
    main()
