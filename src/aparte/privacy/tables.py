"""Tables of an audit, from ``results.json`` alone: for its report, and for pages that quote it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aparte.privacy import traffic
from aparte.privacy.attack import ALL
from aparte.privacy.baselines import Frequency, LanguageModelOnly, Uniform
from aparte.privacy.plots import PAPER_MLP
from aparte.report import percent

Table = list[list[str]]
#: Up to this loss of quality (perplexity above the undefended device's) a text counts as kept.
KEPT = 0.02


def frontier_table(results: dict[str, Any]) -> Table:
    """The best attack on every setting at every cut, and the price; empty if nothing was priced."""
    best = best_attacks(results["attacks"])
    head = (
        "defence|cut|prompt recovered|by|answer recovered|perplexity|same choices|same answers|"
        "bytes sent|speed"
    )
    table = [head.split("|")]
    for row in results["defences"]:
        setting = setting_of(row)
        prompt = best.get((setting, row["cut"], "prompt"))
        answer = best.get((setting, row["cut"], "answer"))
        if prompt is None and answer is None:  # nothing attacked it, so a price says nothing
            continue
        table.append(
            [
                setting,
                row["cut"],
                percent(prompt["top1"] if prompt else None),
                prepared(prompt) if prompt else "",
                percent(answer["top1"] if answer else None),
                f"x {row['perplexity_ratio']:.4g}",
                percent(row["agreement"]),
                percent(row.get("answers_same")),
                f"x {row['bytes_ratio']:.3g}",
                f"x {row['speed_ratio']:.3g}",
            ]
        )
    return table if len(table) > 1 else []


def frontier_sentence(results: dict[str, Any]) -> str:
    """What the best setting reaches that keeps the text."""
    best = best_attacks(results["attacks"])
    kept = [
        (best[setting_of(row), row["cut"], "prompt"]["top1"], setting_of(row), row["cut"])
        for row in results["defences"]
        if row["perplexity_ratio"] <= 1 + KEPT and (setting_of(row), row["cut"], "prompt") in best
    ]
    if not kept:
        return f"No setting that was measured keeps perplexity within {percent(KEPT)}."
    share, setting, cut = min(kept)
    return (
        f"Of the settings that keep perplexity within {percent(KEPT)}, the one that gives away least "
        f"({setting}, cut {cut}) still gives away {percent(share)} of the prompt's tokens."
    )


def best_attacks(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By defence, cut and target the row of the attack that recovered most; baselines do not count."""
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["defence"], row["cut"], row["target"]
        if row["name"] in baselines() or not on_all(row):
            continue
        if key not in best or row["top1"] > best[key]["top1"]:
            best[key] = row
    return best


def setting_of(price: dict[str, Any]) -> str:
    """What ``attacks[]`` call the setting of a row of ``defences[]``."""
    return "none" if price["name"] == "depth" else str(price["setting"])


def depth_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Top-1 of every attack without a defence, by cut."""
    mine = [row for row in rows if row["defence"] == "none" and on_all(row) and row["name"] != traffic.NAME]
    cuts = list(dict.fromkeys(row["cut"] for row in mine))
    if not cuts:
        return []
    attacks = dict.fromkeys((row["name"], row["target"], row["attacker_tokens"]) for row in mine)
    shares = {(row["name"], row["target"], row["attacker_tokens"], row["cut"]): row["top1"] for row in mine}
    return [
        ["attack", "reads", "own text, tokens", *(f"cut {cut}" for cut in cuts)],
        *(
            [name, target, f"{tokens:,}", *(percent(shares.get((name, target, tokens, cut))) for cut in cuts)]
            for name, target, tokens in attacks
        ),
    ]


def attack_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Every attack with all of its figures."""
    head = "attack|cut|defence|top-1|top-5|whole texts|ROUGE-L|BLEU|personal data|attacker's tokens|seconds"
    return [
        head.split("|"),
        *(
            [
                prepared(row),
                row["cut"],
                row["defence"],
                *(percent(row[key]) for key in ("top1", "top5", "exact", "rouge_l", "bleu", "pii_recall")),
                f"{row['attacker_tokens']:,}",
                f"{row['seconds']:.1f}",
            ]
            for row in rows
        ),
    ]


def prepared(row: dict[str, Any]) -> str:
    """An attack's name, and for one that knows the defence what it prepared with."""
    own = ["own private ends"] if row.get("own_copy") else []
    leaked = [f"{row['leaked']:,} leaked pairs"] if row.get("leaked") else []
    return ", ".join([row["name"], *own, *leaked])


def on_all(row: dict[str, Any]) -> bool:
    """Whether the attacker had text of all domains and was tested on all."""
    return str(row.get("trained_on", ALL)) == ALL


def domain_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Top-1 of the MLP in and out of domain; empty if it was not measured."""
    mine = [row for row in rows if not on_all(row)]
    tested = list(dict.fromkeys(row["tested_on"] for row in mine))
    if not mine:
        return []
    shares = {
        (row["trained_on"], row["attacker_tokens"], row["tested_on"]): percent(row["top1"]) for row in mine
    }
    trained = dict.fromkeys((domain, tokens) for domain, tokens, _ in shares)
    return [
        ["trained on", "tokens", *(f"tested on {other}" for other in tested)],
        *(
            [domain, f"{tokens:,}", *(shares[domain, tokens, other] for other in tested)]
            for domain, tokens in trained
        ),
    ]


def mlp_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Top-1 of the MLP by depth and by its own text, beside paper A's; empty if it was not measured."""
    mine = [row for row in rows if row["name"] == "mlp" and row["defence"] == "none" and on_all(row)]
    sizes = sorted({row["attacker_tokens"] for row in mine})
    if not mine:
        return []
    table = [["layers before the middle", "paper A", *(f"{size:,} tokens" for size in sizes)]]
    for front in sorted({int(row["cut"].split(",")[0]) for row in mine}):
        here = {row["attacker_tokens"]: row["top1"] for row in mine if int(row["cut"].split(",")[0]) == front}
        table.append(
            [str(front), percent(PAPER_MLP.get(front)), *(percent(here.get(size)) for size in sizes)]
        )
    return table


def personal_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Recall of personal data by entity type; empty if the texts hold none."""
    kinds = sorted({kind for row in rows for kind in row["pii"]})
    if not kinds:
        return []
    table = [["attack, cut, defence", *(kind.lower().replace("_", " ") for kind in kinds)]]
    for row in rows:
        label = f"{row['name']}, {row['cut']}, {row['defence']}"
        table.append([label, *(percent(row["pii"].get(kind)) for kind in kinds)])
    return table


def defence_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What each defence costs."""
    head = (
        "defence|cut|perplexity|ratio|same choices|same answers|same tokens of answers|bytes sent, ratio|"
        "speed, ratio|layers on the device"
    )
    return [
        head.split("|"),
        *(
            [
                row["setting"],
                row["cut"],
                f"{row['perplexity']:.4g}",
                f"{row['perplexity_ratio']:.4g}",
                percent(row["agreement"]),
                percent(row.get("answers_same")),
                percent(row.get("answer_tokens_same")),
                f"{row['bytes_ratio']:.3g}",
                f"{row['speed_ratio']:.3g}",
                f"{row['device_layers']:.3g}",
            ]
            for row in rows
        ),
    ]


def traffic_sentence(row: dict[str, Any]) -> str:
    """Who told which prompt was answered."""
    views = row["views"]
    names = {
        "network": "an observer of the encrypted connection",
        "cloud": "the cloud",
        "answer_only": "the cloud, from the answer alone, without the prompt's length",
    }
    told = "; ".join(f"{names[name]} in {percent(views[name]['top1'])} of cases" for name in names)
    under = "" if row["defence"] == "none" else f"With {row['defence']}: "
    return (
        f"{under}Which of {row['prompts']} known prompts was being answered (speculative decoding, "
        f"temperature {row['temperature']:g}, earlier answers to each known) was told by: {told}. "
        f"By chance: {percent(1 / row['prompts'])}."
    )


def baselines() -> tuple[str, ...]:
    """The names of what looks at no state."""
    return Uniform.name, Frequency.name, LanguageModelOnly.name
