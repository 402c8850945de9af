"""Measure the table in the README and write it there.

    .venv/bin/python benchmarks/readme_results.py            # measure and write
    .venv/bin/python benchmarks/readme_results.py --print    # measure and print

Device, cloud and emulated link run on this machine, each in a process of its own, as in ``make demo``.
The modes are interleaved in one run; read ratios, not absolute numbers.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from aparte.answer import Answer, Writer
from aparte.cli.setup import connect, load_models
from aparte.config import DEFAULT_MODEL, Sampling, Stopping
from aparte.connection import Connection
from aparte.measure.verify import Reference
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PROMPTS = {
    "code": "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "question": "Why is the sky blue?",
    "list": "List the planets of the solar system, one per line, with their number of moons.",
}
MODES = ("sequential", "jacobi", "lookahead", "auto")
RTT_MS = 80.0
NEW_TOKENS = 96


def measure() -> str:
    """Run everything and return the block for the README."""
    connection = Connection(DEFAULT_MODEL, rtt_ms=RTT_MS)
    answers: dict[tuple[str, str], Answer] = {}
    with connect(connection) as writer:
        encoded = {
            name: writer.codec.encode_chat([{"role": "user", "content": text}])
            for name, text in PROMPTS.items()
        }
        for name, tokens in encoded.items():
            for mode in MODES:
                print(f"{name}, {mode} ...")
                answers[name, mode] = write(writer, connection, tokens, Decoding(decode=mode))
        reference = Reference(Blueprint.open(resolve(DEFAULT_MODEL), connection.compute), writer.codec.eos)
        unsplit = {name: reference.write(tokens, NEW_TOKENS).tokens for name, tokens in encoded.items()}
    rows = [
        row(name, mode, answers[name, mode], answers[name, "sequential"], unsplit[name])
        for name in PROMPTS
        for mode in MODES
    ]
    overhead = sorted(
        step.step_ms - RTT_MS - step.timing.device_ms - step.draft_ms - step.timing.cloud_ms
        for name in PROMPTS
        for step in answers[name, "sequential"].steps[1:]
    )
    return "\n".join(
        [
            f"Model `{DEFAULT_MODEL}`, cut {connection.cut}, packed half-precision weights, "
            f"float16 on the wire, greedy, {NEW_TOKENS} tokens, {RTT_MS:g} ms emulated round trip. "
            f"Device, cloud and link shared {os.cpu_count()} cores "
            f"({platform.machine()}, Python {platform.python_version()}).",
            "",
            "| prompt | decoding | MAT | tok/s | to sequential | bytes per token, up / down | identical |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"A sequential step took {overhead[len(overhead) // 2]:.1f} ms (median) more than the round trip "
            "plus what both sides computed. *Identical* compares with the tokens of the unsplit model. "
            "Written by `benchmarks/readme_results.py`.",
        ]
    )


def write(writer: Writer, connection: Connection, tokens: list[int], decoding: Decoding) -> Answer:
    """One greedy answer that pays for its own prompt."""
    writer.forget()
    return writer.complete(
        tokens,
        make_drafter(decoding, models=load_models(decoding, connection, writer, quiet=True)),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(max_new_tokens=NEW_TOKENS),
    )


def row(name: str, mode: str, answer: Answer, sequential: Answer, unsplit: list[int]) -> str:
    """One line of the table."""
    up, down = answer.bytes_per_token
    ratio = answer.tok_s / sequential.tok_s
    same = "yes" if answer.token_ids == unsplit else "no"
    return (
        f"| {name} | {mode} | {answer.mat:.2f} | {answer.tok_s:.2f} | {ratio:.2f}x | "
        f"{up:.0f} / {down:.0f} | {same} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--print", action="store_true", dest="only_print", help="leave the README alone")
    options = parser.parse_args()
    block = measure()
    if options.only_print:
        print(block)
        return
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
