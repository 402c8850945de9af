"""The report of an audit: one page that needs nothing else (HTML), and the same as Markdown.

Both are made from ``results.json`` alone, so they can say no more than was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aparte.privacy import traffic
from aparte.privacy.adaptive import Adaptive, Leaked
from aparte.privacy.baselines import Frequency, LanguageModelOnly, Uniform
from aparte.privacy.completion import Completion, LogitLens
from aparte.privacy.gradient import Gradient
from aparte.privacy.linear import Linear
from aparte.privacy.mlp import Mlp
from aparte.privacy.plots import depth_plot, frontier_plot
from aparte.privacy.sequence import SequenceInverter
from aparte.privacy.tables import (
    attack_table,
    best_attacks,
    defence_table,
    domain_table,
    frontier_sentence,
    frontier_table,
    mlp_table,
    on_all,
    personal_table,
    traffic_sentence,
)
from aparte.privacy.threats import BASELINES, THREATS
from aparte.privacy.verdict import TARGETS
from aparte.privacy.vocabulary import Vocabulary
from aparte.report import Block, html_page, markdown_page, minutes, percent

_ABOUT: tuple[Any, ...] = (
    Vocabulary,
    Completion,
    LogitLens,
    Mlp,
    Linear,
    SequenceInverter,
    Gradient,
    Adaptive,
    Leaked(Linear(), 0),
    Leaked(Mlp(), 0),
    Uniform,
    Frequency,
    LanguageModelOnly,
)


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Write ``results.json``, ``report.md`` and ``report.html`` into ``folder``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    blocks = _blocks(results)
    (folder / "report.md").write_text(markdown_page(blocks), encoding="utf-8")
    page = html_page(f"What the cloud can learn: {results['model']}", blocks)
    (folder / "report.html").write_text(page, encoding="utf-8")


def verdict(results: dict[str, Any]) -> list[str]:
    """What the figures mean, in a sentence per question."""
    best = best_attacks(results["attacks"])
    sentences = []
    for target in TARGETS:
        plain = [row for (setting, _, of), row in best.items() if (setting, of) == ("none", target)]
        if plain:
            row = max(plain, key=lambda row: row["top1"])
            sentences.append(
                f"Without a defence, the best attack ({row['name']}, cut {row['cut']}) recovered "
                f"{percent(row['top1'])} of the tokens of the {target}."
            )
    for price in results["defences"]:
        found = best.get((price["setting"], price["cut"], "prompt"))
        if found is not None and price["cut"] == results["cuts"][0]:
            sentences.append(
                f"With {price['setting']} at cut {price['cut']}: {percent(found['top1'])} by "
                f"{found['name']}, at {price['perplexity_ratio']:.3g} times the perplexity and "
                f"{percent(price['agreement'])} of the device's choices unchanged."
            )
    if any(key[2] == "prompt" for key in best) and results["defences"]:
        sentences.append(frontier_sentence(results))
    return sentences


def _blocks(results: dict[str, Any]) -> list[Block]:
    attacks, defences = results["attacks"], results["defences"]
    blocks: list[Block] = [
        ("h1", f"What the cloud can learn: {results['model']}"),
        (
            "p",
            f"{results['layers']} layers, cuts {', '.join(results['cuts'])} (layers on the device before "
            f"and after the middle), {results['wire']} on the wire, computed in {results['dtype']}. "
            f"Text: {', '.join(results['text'])}; {results['victims']} texts were attacked, none of which "
            f"any attacker trained on. Seed {results['seed']}; "
            f"{'quick' if results['quick'] else 'full'} audit, {minutes(results['seconds'])} of "
            "computing."
            + (
                f" {results['unfinished']} of its parts are not finished and missing here."
                if results.get("unfinished")
                else ""
            ),
        ),
        ("h2", "In short"),
        ("verdict", verdict(results)),
        (
            "p",
            "Figures hold for these attacks, this text and this model. Better attacks may exist; a low "
            "figure is not a proof of protection, a high one is a proof of the lack of it.",
        ),
    ]
    if frontier := frontier_table(results):
        blocks += [("h3", "The best attack on every setting, and its price"), ("table", frontier)]
    blocks.append(("h2", "Who attacks"))
    for threat in THREATS:
        blocks += [("h3", threat.title), ("p", threat.text)]
    blocks += [("h3", BASELINES.title), ("p", BASELINES.text), ("h2", "Recovered text")]
    prompt = [row for row in attacks if row.get("target") == "prompt" and on_all(row)]
    if prompt:
        blocks.append(("img", ("Recovered tokens by depth, undefended", depth_plot(attacks))))
        blocks.append(("table", attack_table(prompt)))
    answer = [row for row in attacks if row.get("target") == "answer"]
    if answer:
        blocks += [("h2", "Recovered answers"), ("table", attack_table(answer))]
    if mlp := mlp_table(attacks):
        blocks += [
            ("h2", "The MLP inverter beside paper A's"),
            (
                "p",
                "Paper A: Mistral 7B, 880 samples, 221 test samples that share texts with them. Here: this "
                "model, split by text. A fall with depth is that of an attacker with little data and without "
                "the weights.",
            ),
            ("table", mlp),
        ]
    if domains := domain_table(attacks):
        blocks += [
            ("h2", "In and out of domain"),
            (
                "p",
                "Top-1 of the MLP where it was trained on text of one domain alone and tested on others. "
                "Texts to train and to test are different ones in each domain.",
            ),
            ("table", domains),
        ]
    if personal := personal_table(prompt):
        blocks += [("h2", "Personal data"), ("table", personal)]
    if watched := [row for row in attacks if row["name"] == traffic.NAME]:
        blocks += [("h2", "Traffic"), *(("p", traffic_sentence(row)) for row in watched)]
    if defences:
        blocks += [("h2", "What the defences cost"), ("table", defence_table(defences))]
        if prompt:
            blocks.append(("img", ("Recovery against loss of quality", frontier_plot(attacks, defences))))
        told = {row["setting"]: row["describes"] for row in defences if row["name"] != "depth"}
        blocks.append(("list", [f"{setting}: {text}" for setting, text in told.items()]))
    blocks += [("h2", "The attacks"), ("words", _about(attacks))]
    return blocks


def _about(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    used = {row["name"] for row in rows}
    titles = {threat.key: threat.title for threat in (*THREATS, BASELINES)}
    table = [["attack", "who", "source", "assumes", "cost"]]
    for attack in _ABOUT:
        if attack.name in used:
            table.append(
                [attack.name, titles[attack.threat], attack.source, attack.assumes, attack.cost],
            )
    if traffic.NAME in used:
        table.append([traffic.NAME, titles[traffic.THREAT], traffic.SOURCE, traffic.ASSUMES, traffic.COST])
    return table
