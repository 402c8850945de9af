"""Hyper-parameters of both papers, and this project's defaults, read from the code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aparte.config import Cut, Sampling, ServerLimits
from aparte.measure.reproduce.lab import Lab
from aparte.measure.reproduce.section import Figure, Table
from aparte.speculate.settings import LONGEST_DRAFT, Decoding, Drafting

KEY = "hyper"
TITLE = "Hyper-parameters"
PAPER = "both"
WHAT = "What the papers set, and what this project does by default."


def run(lab: Lab) -> dict[str, Any]:
    blueprint = lab.blueprint
    lookahead, jacobi, auto = Decoding("lookahead"), Decoding("jacobi"), Decoding("auto")
    return {
        "rows": [
            ["layers on the device, front and back", "A: 2 and 2", str(Cut())],
            [
                "numbers",
                "A: float16, compute and wire",
                f"{blueprint.precision.name}, {blueprint.precision.default_wire} on the wire",
            ],
            ["choice of tokens", "A and B: greedy", f"greedy (temperature {Sampling().temperature:g})"],
            ["n of lookahead", "A: 3 to 7, best 3", str(lookahead.ngram)],
            [
                "speculative nodes per round trip",
                "A: n-grams and a window of guesses",
                f"lookahead up to {lookahead.node_limit}; auto up to {auto.node_limit}, as many as pay on the link",
            ],
            ["guesses per Jacobi block", "A: not given", str(jacobi.jacobi_block)],
            ["idle session", "A: 5 minutes", f"{ServerLimits().idle_s / 60:g} minutes"],
            ["tokens of an answer", "A: 100 and 200; B: not given", "see each section"],
            [
                "inverter",
                "A: 4096-2048-2048-32000, about 880 pairs",
                "half the width twice, 880 pairs and more",
            ],
            [
                "drafted tokens per block, d",
                "B: 6 in its program, swept",
                f"as many as pay on the link, at most {LONGEST_DRAFT}",
            ],
            [
                "acceptance",
                "B: random test against the draft's probability",
                f"{Drafting().accept}: the text of the model alone; or rejection sampling",
            ],
            ["caches", "B: none in its program", "on both sides"],
        ]
    }


def tables(found: dict[str, Any]) -> list[Table]:
    return [[["", "papers", "here"], *found["rows"]]]


def figures(found: dict[str, Any]) -> Sequence[Figure]:  # noqa: ARG001
    return []


def differences(found: dict[str, Any]) -> list[str]:  # noqa: ARG001
    return [
        "The papers fix what this project decides while it runs: the number of nodes and the length of a block follow "
        "the measured cost of a step."
    ]
