"""The report: one page that needs nothing else (HTML), Markdown with its plots, and all figures as JSON.

All are made from the results alone, so they can say no more than was measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aparte.measure.reproduce.run import SECTIONS
from aparte.measure.reproduce.section import Section, number
from aparte.report import Block, Picture, html_page, markdown_page, minutes, write_pictures

PAPERS = {
    "paper-a": "Private split inference over WANs (arXiv 2602.16760)",
    "paper-b": "SPADE (arXiv 2608.13076)",
    "both": "Both papers",
}


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Write ``results.json``, ``report.md`` with its plots, and ``report.html`` into ``folder``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    found = blocks(results)
    write_pictures(found, folder)
    (folder / "report.md").write_text(markdown_page(found), encoding="utf-8")
    (folder / "report.html").write_text(html_page(found[0][1], found), encoding="utf-8")


def summary(results: dict[str, Any]) -> list[str]:
    """The first sentence of each section."""
    return [
        f"{section.TITLE}: {section.differences(results['sections'][section.KEY]['result'])[0]}"
        for section in _ran(results)
        if section.KEY != "hyper"
    ]


def _ran(results: dict[str, Any]) -> list[Section]:
    return [section for section in SECTIONS if section.KEY in results["sections"]]


def blocks(results: dict[str, Any]) -> list[Block]:
    """The page, block by block."""
    ran, sections = _ran(results), results["sections"]
    machines = list(dict.fromkeys(section["machine"] for section in sections.values()))
    commits = list(dict.fromkeys(section["commit"] for section in sections.values()))
    made: list[Block] = [
        ("h1", f"Both papers, run again: {results['model']}"),
        (
            "p",
            f"Written by `aparte reproduce`; do not edit. Model {results['model']}: {results['layers']} layers of "
            f"width {results['hidden_size']}, cut {results['cut']}, computed in {results['dtype']}, {results['wire']} "
            f"on the wire, greedy, seed {results['seed']}. Device, cloud and emulated link share one machine: "
            f"{'; '.join(machines)}. Commit {', '.join(commits)}. "
            f"{'Quick' if results['quick'] else 'Full'} run, {minutes(results['seconds'])}. Questions of "
            f"paper B: {results['data'] or 'a dozen of this project'}.",
        ),
        (
            "p",
            "The papers ran models of 1 to 12 billion parameters on GPUs apart from each other; this is what can be "
            "run on one machine. So absolute speeds differ everywhere, and what is to be compared are "
            "ratios, shares and shapes. Each section says what the differences come from.",
        ),
        *_warning(sections),
        ("h2", "In short"),
        ("list", summary(results)),
    ]
    paper = ""
    for section in ran:
        if paper != section.PAPER:
            paper = section.PAPER
            made.append(("h2", PAPERS[paper]))
        made += _section(section, sections[section.KEY])
    made += [("h2", "Origin of each section"), ("table", _origins(ran, sections))]
    return made


def _warning(sections: dict[str, Any]) -> list[Block]:
    """If other programs had the processors while times were taken."""
    # Both sides of a run of ours, of which one computes at a time, and what else they start.
    most = (os.cpu_count() or 1) + 1
    busy = [section["load"] for section in sections.values() if (section.get("load") or 0) > most]
    if not busy:
        return []
    return [
        (
            "verdict",
            [
                f"This machine was busy with other work meanwhile: up to {max(busy):g} programs wanted its processors "
                "when a section began. Times and speeds below are those of that crowd and say little; tokens per step, "
                "shares, bytes, memory and sameness of text do not depend on it. Run it again on a quiet machine."
            ],
        )
    ]


def _section(section: Section, entry: dict[str, Any]) -> list[Block]:
    found = entry["result"]
    made: list[Block] = [("h3", section.TITLE), ("p", section.WHAT)]
    made += [("table", table) for table in section.tables(found)]
    for figure in section.figures(found):
        made.append(("figure", figure if isinstance(figure, Picture) else figure.picture()))
    made.append(("list", list(section.differences(found))))
    return made


def _origins(ran: Sequence[Section], sections: dict[str, Any]) -> list[list[str]]:
    table = [["section", "commit", "seconds", "load before", "link", "hash of the prompts"]]
    for section in ran:
        entry = sections[section.KEY]
        found = entry["result"]
        inner = found.get("chain", found)
        link = "" if "rtt_ms" not in found else f"{found['rtt_ms']:g} ms"
        link = f"{link}, {found['mbps']:g} Mbit/s" if link and "mbps" in found else link
        link = found.get("grid", link)
        prompts = inner.get("prompts", "")
        busy = number(entry.get("load"))
        table.append([section.TITLE, entry["commit"], f"{entry['seconds']:.0f}", busy, link, str(prompts)])
    return table
