"""Lookahead by n-gram size and by kind of prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aparte.measure.plot_file import INK, STYLES
from aparte.measure.prompts import digest
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import WAN, Figures, Lab
from aparte.measure.reproduce.prompts import CATEGORIES
from aparte.measure.reproduce.section import Figure, Table, number
from aparte.report import percent
from aparte.speculate.settings import Decoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from aparte.answer import Answer

KEY = "ngram"
TITLE = "n-gram size and kind of prompt"
PAPER = "paper-a"
WHAT = (
    f"Paper A's lookahead with n-grams of 3 to 7 tokens, on prompts of its four kinds written for this project, "
    f"greedy. The link ({WAN}) is simulated: both sides compute and are timed in this process, round trips and bytes "
    "are added by arithmetic. *Match rate* is the share of round trips that committed a drafted token; read like that "
    "the paper's tokens per step and match rates fit each other. The last row is this project's own drafting."
)
BY_CATEGORY = 5


def run(lab: Lab) -> dict[str, Any]:
    scale = lab.scale
    writer, link = lab.simulated
    link.profile = WAN
    ways: list[tuple[str, Decoding]] = [("0", Decoding("sequential", in_flight=1))]
    ways += [(str(n), Decoding("lookahead", ngram=n, in_flight=1)) for n in scale.ngrams]
    ways.append(("auto", Decoding("auto", in_flight=1)))
    auto = lab.automatic(writer)
    lab.write(writer, "Hello", ways[0][1], 4)
    answers: dict[str, dict[str, list[Answer]]] = {key: {} for key, _ in ways}
    asked = [
        (category, text)
        for index in range(scale.prompts_per_category)
        for category, texts in CATEGORIES.items()
        for text in texts[index : index + 1]
    ]
    for category, text in lab.counted("n-gram size", asked):
        for key, decoding in ways:
            drafter = auto if key == "auto" else None
            answer = lab.write(writer, text, decoding, scale.ngram_tokens, drafter)
            answers[key].setdefault(category, []).append(answer)
    first = answers["0"]
    return {
        "rows": {
            key: {
                "all": Figures.of([answer for some in by.values() for answer in some]).to_json(),
                "categories": {category: Figures.of(some).to_json() for category, some in by.items()},
                "identical": all(
                    mine.token_ids == other.token_ids
                    for category, some in by.items()
                    for mine, other in zip(some, first[category], strict=True)
                ),
            }
            for key, by in answers.items()
        },
        "tokens": scale.ngram_tokens,
        "rtt_ms": WAN.rtt_ms,
        "mbps": WAN.mbps,
        "prompts": digest(asked),
    }


def tables(found: dict[str, Any]) -> list[Table]:
    rows = found["rows"]
    table: Table = [["n", "paper A, 7B", "paper A, 12B", "here", "nodes per step", "same text"]]
    for key, row in rows.items():
        n = int(key) if key.isdecimal() else None
        said = [paper_a.NGRAM[size].get(-1 if n is None else n) for size in ("7B", "12B")]
        table.append(
            [
                {"0": "sequential", "auto": "`auto`"}.get(key, key),
                *("" if one is None else _cell(*one) for one in said),
                _cell(row["all"]["tok_s"], row["all"]["mat"], row["all"]["match_rate"] if n != 0 else None),
                number(row["all"]["nodes_per_step"]),
                "yes" if row["identical"] else "no",
            ]
        )
    shown = str(BY_CATEGORY)
    kinds: Table = [[f"kind of prompt, n = {shown}", "paper A, 7B", "paper A, 12B", "here", "`auto` here"]]
    for category, printed in paper_a.CATEGORY.items():
        mine = [rows[key]["categories"].get(category) for key in (shown, "auto") if key in rows]
        kinds.append(
            [
                category,
                _cell(printed[0], printed[1]),
                _cell(printed[2], printed[3]),
                *(_cell(one["tok_s"], one["mat"], one["match_rate"]) if one else "" for one in mine),
            ]
        )
    return [table, kinds]


def _cell(tok_s: float, mat: float, rate: float | None = None) -> str:
    return f"{tok_s:.1f} · {mat:.2f}" + ("" if rate is None else f" · {percent(rate)}")


def figures(found: dict[str, Any]) -> list[Figure]:
    sizes = [key for key in found["rows"] if key.isdecimal() and key != "0"]

    def draw(axes: Axes) -> None:
        for category, (colour, marker) in zip(CATEGORIES, STYLES, strict=False):
            points = [found["rows"][key]["categories"].get(category) for key in sizes]
            axes.plot(
                [int(key) for key in sizes],
                [point["mat"] if point else float("nan") for point in points],
                color=colour,
                marker=marker,
                label=category,
            )
        for size, dash in (("7B", "--"), ("12B", ":")):
            said = [paper_a.NGRAM[size][int(key)][1] for key in sizes]
            axes.plot([int(key) for key in sizes], said, dash, color=INK, label=f"paper A, {size}, all")
        axes.set_xticks([int(key) for key in sizes])
        axes.set_xlabel("n")
        axes.set_ylabel("tokens per round trip")

    return [Figure("ngram", "Lookahead: tokens per round trip by n-gram size", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    plain = rows["0"]["all"]
    drafted = {key: row["all"] for key, row in rows.items() if key.isdecimal() and key != "0"}
    best = max(drafted, key=lambda key: drafted[key]["tok_s"])
    cost = drafted[best]["step_ms"] / plain["step_ms"]
    peak = max(row["peak"] for row in drafted.values())
    says = [
        f"Lookahead is fastest at n = {best} with {drafted[best]['mat']:.2f} tokens per round trip and "
        f"{drafted[best]['tok_s'] / plain['tok_s']:.2f} times the sequential speed (paper A: n = 3, 1.21, 1.12 "
        f"times); `auto` commits {rows['auto']['all']['mat']:.2f}.",
        f"A step with its nodes takes {cost:.2f} times a sequential one, so that is the break-even in tokens per "
        f"round trip (paper A: {paper_a.BREAK_EVEN}); the most that one step committed is {peak} "
        f"({paper_a.PEAK}).",
    ]
    if str(BY_CATEGORY) in rows:
        kinds = rows[str(BY_CATEGORY)]["categories"]
        order = sorted(kinds, key=lambda kind: -kinds[kind]["mat"])
        says.append(
            f"By kind of prompt the order is {', '.join(order)}; in the paper code leads. "
            "One or two prompts of each kind decide here, and two there."
        )
    says.append(
        "The pool here also matches on two tokens and takes n-grams from the prompt, which the paper's table of one "
        "entry per token does not; verified text is the sequential one in every row."
        if all(row["identical"] for row in rows.values())
        else "Some answers differ from the sequential ones: in 16 bits, a step of more rows can flip a near-tie."
    )
    return says
