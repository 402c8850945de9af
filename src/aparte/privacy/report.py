"""The report of an audit: one page that needs nothing else (HTML), and the same as Markdown.

Both are made from ``results.json`` alone, so they can say no more than was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from aparte.privacy import traffic
from aparte.privacy.adaptive import Adaptive, Leaked
from aparte.privacy.baselines import Frequency, LanguageModelOnly, Uniform
from aparte.privacy.completion import Completion, LogitLens
from aparte.privacy.gradient import Gradient
from aparte.privacy.linear import Linear
from aparte.privacy.mlp import Mlp
from aparte.privacy.plots import PAPER_MLP, depth_plot, frontier_plot
from aparte.privacy.sequence import SequenceInverter
from aparte.privacy.threats import BASELINES, THREATS
from aparte.privacy.vocabulary import Vocabulary

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
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1f2933}
body{max-width:62rem;margin:2rem auto;padding:0 1rem}
h1,h2,h3{line-height:1.2}
table{border-collapse:collapse;margin:1rem 0;font-size:.9rem;display:block;overflow-x:auto}
th,td{border-bottom:1px solid #dde3ea;padding:.3rem .6rem;text-align:right}
th:first-child,td:first-child{text-align:left}
img{max-width:100%}
.verdict{border-left:4px solid #d55e00;padding:.2rem 2rem}
"""

Block = tuple[str, Any]


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Write ``results.json``, ``report.md`` and ``report.html`` into ``folder``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    blocks = _blocks(results)
    (folder / "report.md").write_text("\n".join(map(_markdown, blocks)), encoding="utf-8")
    title = f"What the cloud can learn: {results['model']}"
    page = (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n'
        + "\n".join(map(_html, blocks))
        + "\n</html>\n"
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


def verdict(results: dict[str, Any]) -> list[str]:
    """What the figures mean, in a sentence per question."""
    rows = results["attacks"]
    sentences = []
    for target, what in (("prompt", "the prompt"), ("answer", "the answer")):
        found = [row for row in rows if row.get("target") == target and row["name"] not in _baselines()]
        if plain := [row for row in found if row["defence"] == "none"]:
            best = max(plain, key=lambda row: row["top1"])
            sentences.append(
                f"Without a defence, the best attack ({best['name']}, cut {best['cut']}) recovered "
                f"{_percent(best['top1'])} of the tokens of {what}."
            )
    prompt = [row for row in rows if row.get("target") == "prompt" and row["name"] not in _baselines()]
    for price in results["defences"]:
        mine = [row for row in prompt if (row["defence"], row["cut"]) == (price["setting"], price["cut"])]
        if mine:
            best = max(mine, key=lambda row: row["top1"])
            sentences.append(
                f"With {price['setting']} at cut {price['cut']}: {_percent(best['top1'])} by "
                f"{best['name']}, at {price['perplexity_ratio']:.3g} times the perplexity and "
                f"{_percent(price['agreement'])} of the device's choices unchanged."
            )
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
            f"{'quick' if results['quick'] else 'full'} audit.",
        ),
        ("h2", "In short"),
        ("verdict", verdict(results)),
        (
            "p",
            "Figures hold for these attacks, this text and this model. Better attacks may exist; a low "
            "figure is not a proof of protection, a high one is a proof of the lack of it.",
        ),
        ("h2", "Who attacks"),
    ]
    for threat in THREATS:
        blocks += [("h3", threat.title), ("p", threat.text)]
    blocks += [("h3", BASELINES.title), ("p", BASELINES.text), ("h2", "Recovered text")]
    prompt = [row for row in attacks if row.get("target") == "prompt"]
    if prompt:
        blocks.append(("img", ("Recovered tokens by depth, undefended", depth_plot(attacks))))
        blocks.append(("table", _attack_table(prompt)))
    answer = [row for row in attacks if row.get("target") == "answer"]
    if answer:
        blocks += [("h2", "Recovered answers"), ("table", _attack_table(answer))]
    if mlp := _mlp_table(attacks):
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
    if personal := _personal_table(prompt):
        blocks += [("h2", "Personal data"), ("table", personal)]
    if watched := [row for row in attacks if row["name"] == traffic.NAME]:
        blocks += [("h2", "Traffic"), *(("p", _traffic(row)) for row in watched)]
    if defences:
        blocks += [("h2", "What the defences cost"), ("table", _defence_table(defences))]
        if prompt:
            blocks.append(("img", ("Recovery against loss of quality", frontier_plot(attacks, defences))))
        told = {row["setting"]: row["describes"] for row in defences if row["name"] != "depth"}
        blocks.append(("list", [f"{setting}: {text}" for setting, text in told.items()]))
    blocks += [("h2", "The attacks"), ("table", _about(attacks))]
    return blocks


def _attack_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    head = "attack|cut|defence|top-1|top-5|whole texts|ROUGE-L|BLEU|personal data|attacker's tokens|seconds"
    return [
        head.split("|"),
        *(
            [
                _prepared(row),
                row["cut"],
                row["defence"],
                *(_percent(row[key]) for key in ("top1", "top5", "exact", "rouge_l", "bleu", "pii_recall")),
                str(row["attacker_tokens"]),
                f"{row['seconds']:.1f}",
            ]
            for row in rows
        ),
    ]


def _prepared(row: dict[str, Any]) -> str:
    """An attack's name, and for one that knows the defence what it prepared with."""
    own = ["own private ends"] if row.get("own_copy") else []
    leaked = [f"{row['leaked']} leaked pairs"] if row.get("leaked") else []
    return ", ".join([row["name"], *own, *leaked])


def _mlp_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    mine = [row for row in rows if row["name"] == "mlp" and row["defence"] == "none"]
    sizes = sorted({row["attacker_tokens"] for row in mine})
    if not mine:
        return []
    table = [["layers before the middle", "paper A", *(f"{size} tokens" for size in sizes)]]
    for front in sorted({int(row["cut"].split(",")[0]) for row in mine}):
        here = {row["attacker_tokens"]: row["top1"] for row in mine if int(row["cut"].split(",")[0]) == front}
        table.append(
            [str(front), _percent(PAPER_MLP.get(front)), *(_percent(here.get(size)) for size in sizes)]
        )
    return table


def _personal_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    kinds = sorted({kind for row in rows for kind in row["pii"]})
    if not kinds:
        return []
    table = [["attack, cut, defence", *(kind.lower().replace("_", " ") for kind in kinds)]]
    for row in rows:
        label = f"{row['name']}, {row['cut']}, {row['defence']}"
        table.append([label, *(_percent(row["pii"].get(kind)) for kind in kinds)])
    return table


def _defence_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    head = "defence|cut|perplexity|ratio|same choices|bytes sent, ratio|speed, ratio|layers on the device"
    return [
        head.split("|"),
        *(
            [
                row["setting"],
                row["cut"],
                f"{row['perplexity']:.4g}",
                f"{row['perplexity_ratio']:.4g}",
                _percent(row["agreement"]),
                f"{row['bytes_ratio']:.3g}",
                f"{row['speed_ratio']:.3g}",
                f"{row['device_layers']:.3g}",
            ]
            for row in rows
        ),
    ]


def _traffic(row: dict[str, Any]) -> str:
    views = row["views"]
    names = {
        "network": "an observer of the encrypted connection",
        "cloud": "the cloud",
        "answer_only": "the cloud, from the answer alone, without the prompt's length",
    }
    told = "; ".join(f"{names[name]} in {_percent(views[name]['top1'])} of cases" for name in names)
    under = "" if row["defence"] == "none" else f"With {row['defence']}: "
    return (
        f"{under}Which of {row['prompts']} known prompts was being answered (speculative decoding, "
        f"temperature {row['temperature']:g}, earlier answers to each known) was told by: {told}. "
        f"By chance: {_percent(1 / row['prompts'])}."
    )


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


def _baselines() -> tuple[str, ...]:
    return Uniform.name, Frequency.name, LanguageModelOnly.name


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _markdown(block: Block) -> str:
    kind, content = block
    if kind in ("h1", "h2", "h3"):
        return f"{'#' * int(kind[1])} {content}\n"
    if kind == "table":
        head, *rows = content
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
    if kind in ("verdict", "list"):
        return "\n".join(f"- {line}" for line in content) + "\n"
    if kind == "img":
        return f"({content[0]}: plot in report.html)\n"
    return f"{content}\n"


def _html(block: Block) -> str:
    kind, content = block
    if kind == "table":
        head, *rows = content
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"
    if kind in ("verdict", "list"):
        items = "".join(f"<li>{escape(line)}</li>" for line in content)
        return f'<ul class="{kind}">{items}</ul>'
    if kind == "img":
        title, source = content
        return f'<h3>{escape(title)}</h3><img alt="{escape(title)}" src="{source}">'
    return f"<{kind}>{escape(content)}</{kind}>"
