"""Three prompts over three round trips: ``auto`` and sequential, interleaved, tokens per second end to end.

    .venv/bin/python benchmarks/links.py          # a table
    .venv/bin/python benchmarks/links.py --json   # for benchmarks/suite.py

The prompts are of the kinds and lengths that rival systems were measured with: a function with its
explanation, a factual question, a passage to summarise and repeat.
"""

from __future__ import annotations

import argparse
import json

from aparte.answer import Answer, Writer
from aparte.cli.setup import connect, load_models
from aparte.config import DEFAULT_MODEL, Sampling, Stopping
from aparte.connection import Connection
from aparte.measure.prompts import digest
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding

PASSAGE = (
    "The lighthouse at Skerry Point was built in 1874 to guide fishing boats past the reef. Its first "
    "keeper, Morag Sinclair, lit the lamp every evening for thirty-one years and wrote down the weather in "
    "a blue notebook. When the lamp was changed from oil to electricity in 1932, the notebooks were moved "
    "to the town library, where students still use them to study how storms have changed. In 1989 the "
    "lighthouse was closed, and the council planned to tear it down. The town collected money for two "
    "years, bought the tower and turned it into a small museum with a reading room on the first floor."
)
PROMPTS = {
    "code": "Write a Python function that checks whether a word is a palindrome, and explain how it works.",
    "chat": "What is the Great Barrier Reef, where is it, and why is it in danger?",
    "summary": f"Summarise this passage in one sentence, then repeat it word for word.\n\n{PASSAGE}",
}
RTT_MS = (20.0, 80.0, 150.0)
MBPS = 100.0
NEW_TOKENS = 128
MODES = ("sequential", "auto")


def measure() -> list[dict[str, object]]:
    rows = []
    for rtt in RTT_MS:
        connection = Connection(DEFAULT_MODEL, rtt_ms=rtt, mbps=MBPS)
        with connect(connection, quiet=True) as writer:
            for name, text in PROMPTS.items():
                prompt = writer.codec.encode_chat([{"role": "user", "content": text}])
                answers = {mode: write(writer, connection, prompt, Decoding(mode)) for mode in MODES}
                rows.append(
                    {
                        "prompt": name,
                        "prompt_tokens": len(prompt),
                        "rtt_ms": rtt,
                        "mbps": MBPS,
                        "identical": answers["auto"].token_ids == answers["sequential"].token_ids,
                        **{
                            mode: {
                                "tok_s": round(answer.tok_s, 3),
                                "mat": round(answer.mat, 4),
                                "round_trips_per_token": round(1 / answer.mat, 4),
                                "new_tokens": len(answer.token_ids),
                            }
                            for mode, answer in answers.items()
                        },
                    }
                )
    return rows


def write(writer: Writer, connection: Connection, prompt: list[int], decoding: Decoding) -> Answer:
    """One greedy answer that pays for its own prompt and starts with nothing learned."""
    writer.forget()
    return writer.complete(
        prompt,
        make_drafter(decoding, models=load_models(decoding, connection, writer, quiet=True)),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(max_new_tokens=NEW_TOKENS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure()
    if options.json:
        print(json.dumps({"rows": rows, "prompts": digest(PROMPTS), "seed": "greedy, none drawn"}))
        return
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
