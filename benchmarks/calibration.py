"""Measure how often each kind of candidate is right, and write the drafters' starting point.

    .venv/bin/python benchmarks/calibration.py
    .venv/bin/python benchmarks/calibration.py --merged

Runs the default model on the project's own prompts (none of any benchmark) and writes
``src/aparte/speculate/priors.json``: per kind of candidate, trials and hits.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict

from aparte.cli.setup import connect, load_models
from aparte.config import DEFAULT_MODEL, Sampling, Stopping
from aparte.connection import Connection
from aparte.measure.prompts import PROMPTS
from aparte.speculate.calibration import FADE, PRIORS, Calibration, Counts, scaled
from aparte.speculate.drafter import make_drafter
from aparte.speculate.merge import MERGED, Merged
from aparte.speculate.settings import Decoding
from aparte.speculate.source import Candidate

MORE = (
    "Explain how a bicycle stays upright.",
    "Write a polite email asking for a refund.",
    "What is the capital of Australia and why was it chosen?",
    "Write a JavaScript function that reverses a string.",
    "Give me three ideas for a birthday party.",
    "A train travels 120 km in 1.5 hours. What is its average speed? Show your steps.",
    "Translate to French: Where is the nearest pharmacy?",
    "Summarise the water cycle in three sentences.",
    "Write a dialogue between a cat and a dog.",
    "Compare solar and wind power in a table.",
)
DECODING = Decoding("auto", max_nodes=24, in_flight=1)
#: A model drafts as far ahead as the link makes worth while, so there has to be one.
RTT_MS = 80.0


class Counting(Calibration):
    """Adds up what is recorded, beside learning from it."""

    def __init__(self, totals: Counts, start: Counts, fade: float) -> None:
        super().__init__(start, fade)
        self._totals = totals

    def record(self, candidate: Candidate, hit: bool) -> None:
        super().record(candidate, hit)
        trials, hits = self._totals[candidate.kind]
        self._totals[candidate.kind] = (trials + 1, hits + hit)


def count(start: Counts, fade: float) -> Counts:
    """Trials and hits of all kinds, each answer beginning with ``start``."""
    totals: Counts = defaultdict(lambda: (0.0, 0.0))
    connection = Connection(DEFAULT_MODEL, rtt_ms=RTT_MS)
    with connect(connection) as writer:
        models = load_models(DECODING, connection, writer)
        for number, prompt in enumerate((*PROMPTS, *MORE), start=1):
            print(f"{number}/{len(PROMPTS) + len(MORE)}")
            writer.forget()
            drafter = make_drafter(DECODING, models=models)
            assert isinstance(drafter, Merged)
            drafter.calibration = Counting(totals, start, fade)
            writer.complete(
                writer.codec.encode_chat([{"role": "user", "content": prompt}]),
                drafter,
                sampling=Sampling(),
                decoding=DECODING,
                stopping=Stopping(max_new_tokens=128),
            )
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--merged", action="store_true", help="keep what is there of single sources")
    if parser.parse_args().merged:
        single = {tuple(kind): (trials, hits) for kind, trials, hits in json.loads(PRIORS.read_text())}
    else:
        single = count({}, 1.0)
    single = {kind: counts for kind, counts in single.items() if kind[0] != MERGED}
    # What is made of the sources' estimates is measured with these in place.
    merged = {kind: counts for kind, counts in count(scaled(single), FADE).items() if kind[0] == MERGED}
    rows = [
        [list(kind), trials, hits]
        for kind, (trials, hits) in sorted((single | merged).items(), key=lambda item: str(item))
    ]
    PRIORS.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
