"""Jacobi decoding: how many tokens an iteration settles, and what that makes over a WAN."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from aparte.measure.plot_file import STYLES
from aparte.measure.prompts import digest
from aparte.measure.reproduce import paper_a
from aparte.measure.reproduce.lab import WAN, Figures, Lab
from aparte.measure.reproduce.section import Figure, Table, number
from aparte.report import percent
from aparte.speculate.settings import Decoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "jacobi"
TITLE = "Jacobi convergence"
PAPER = "paper-a"
WHAT = (
    "Fixed-point iteration over a block of guesses, one iteration per round trip. What has converged from the left is "
    f"kept at once and the block moves on. The link ({WAN}) is simulated as above."
)


def run(lab: Lab) -> dict[str, Any]:
    scale = lab.scale
    writer, link = lab.simulated
    link.profile = WAN
    ways = {"0": Decoding("sequential", in_flight=1)}
    ways |= {
        str(block): Decoding("jacobi", max_nodes=block, jacobi_block=block, in_flight=1)
        for block in scale.jacobi_blocks
    }
    texts = lab.prompts(4)
    answers: dict[str, list[Any]] = {key: [] for key in ways}
    lab.write(writer, texts[0], ways["0"], 4)
    for text in lab.counted("Jacobi", texts):
        for key, decoding in ways.items():
            answers[key].append(lab.write(writer, text, decoding, scale.jacobi_tokens))
    return {
        "rows": {
            key: {
                **Figures.of(found).to_json(),
                "settled": dict(
                    sorted(
                        Counter(str(step.accepted) for answer in found for step in answer.steps[1:]).items()
                    )
                ),
                "identical": [answer.token_ids for answer in found]
                == [answer.token_ids for answer in answers["0"]],
            }
            for key, found in answers.items()
        },
        "rtt_ms": WAN.rtt_ms,
        "mbps": WAN.mbps,
        "prompts": digest(texts),
    }


def tables(found: dict[str, Any]) -> list[Table]:
    table: Table = [
        [
            "guesses per block",
            "tok/s",
            "tokens per iteration",
            "iterations per block",
            "more than one token in",
        ]
        + ["most in one", "ms per iteration", "same text"]
    ]
    for key, row in found["rows"].items():
        table.append(
            [
                "0 (sequential)" if key == "0" else key,
                number(row["tok_s"]),
                number(row["mat"], 3),
                "" if key == "0" else number((int(key) + 1) / row["mat"]),
                "" if key == "0" else percent(row["match_rate"]),
                str(row["peak"]),
                number(row["step_ms"]),
                "yes" if row["identical"] else "no",
            ]
        )
    table.append(["paper A", f"about {paper_a.JACOBI_TOK_S}", *[""] * 6])
    return [table]


def figures(found: dict[str, Any]) -> list[Figure]:
    def draw(axes: Axes) -> None:
        rows = {key: row for key, row in found["rows"].items() if key != "0"}
        most = max(int(size) for row in rows.values() for size in row["settled"])
        width = 0.8 / len(rows)
        for offset, (key, row) in enumerate(rows.items()):
            total = sum(row["settled"].values())
            sizes = range(1, most + 1)
            axes.bar(
                [size + width * (offset - (len(rows) - 1) / 2) for size in sizes],
                [100 * row["settled"].get(str(size), 0) / total for size in sizes],
                width=width * 0.95,
                color=STYLES[offset][0],
                label=f"block of {key}",
            )
        axes.set_xlabel("tokens that one iteration settles")
        axes.set_ylabel("% of iterations")
        axes.set_xticks(range(1, most + 1))

    return [Figure("jacobi", "Tokens settled per Jacobi iteration", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    key = max((key for key in rows if key != "0"), key=lambda key: rows[key]["tok_s"])
    row, plain = rows[key], rows["0"]
    return [
        f"An iteration settles {row['mat']:.2f} tokens at best (block of {key}), so Jacobi decodes at {row['tok_s']:.1f} "
        f"tok/s, {row['tok_s'] / plain['tok_s']:.2f} times sequential (paper A: about 1.5 tok/s, far below its 8).",
        "Here what has converged is kept after every iteration, so that each one brings a token at least; what it costs "
        "more than a sequential step is its guesses' computing and bytes. The paper's 1.5 tok/s is less than a token per "
        "round trip.",
        f"In {percent(1 - row['match_rate'])} of the iterations only the token that is certain was settled, because a "
        "guess depends on the one before it.",
    ]
