"""Kill the cloud at random moments, and compare every answer with that of an undisturbed run.

    .venv/bin/python benchmarks/kills.py                              # 100 kills, the default model
    .venv/bin/python benchmarks/kills.py --model FOLDER --kills 20 --json

Two clouds run as processes of their own. The one that the device is using gets SIGKILL at a random moment and
is started again; the device goes on at the other one, or waits. Half of the answers are greedy, half sampled
with a seed; half are written one token at a time, half with drafts sent ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from clouds import Cloud, say

from aparte.answer import Answer, Writer
from aparte.config import DEFAULT_MODEL, Compute, Cut, LinkSettings, Sampling, Stopping
from aparte.device import open_writer
from aparte.measure.prompts import PROMPTS
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding

#: How answers are written, in turn: decoding mode and temperature.
WAYS = (("sequential", 0.0), ("auto", 0.8), ("auto", 0.0), ("sequential", 0.8))


class Killer(threading.Thread):
    """Kills what the device is using, and starts it again."""

    def __init__(self, writer: Writer, clouds: list[Cloud], kills: int, gap_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._device: Any = writer.target
        self._clouds = clouds
        self._left = kills
        self._gap_s = gap_s
        self._random = random.Random(seed)
        self.kills = 0
        self.done = threading.Event()

    def run(self) -> None:
        while self._left:
            time.sleep(self._random.uniform(0, 2 * self._gap_s))
            used = next(cloud for cloud in self._clouds if self._device.where.endswith(cloud.url))
            used.kill()
            self._left -= 1
            self.kills += 1
            say(f"kill {self.kills}, {self._left} left")
            used.start()
            used.wait_until_ready()
        self.done.set()


def write(writer: Writer, number: int, most_tokens: int) -> Answer:
    """Answer ``number`` of the suite."""
    mode, temperature = WAYS[number % len(WAYS)]
    text = PROMPTS[(number // len(WAYS)) % len(PROMPTS)]
    decoding = Decoding(mode)
    return writer.complete(
        writer.codec.encode_chat([{"role": "user", "content": text}]),
        make_drafter(decoding),
        sampling=Sampling(temperature, seed=number),
        decoding=decoding,
        stopping=Stopping(most_tokens),
    )


@contextlib.contextmanager
def device(options: argparse.Namespace, clouds: list[Cloud]) -> Iterator[Writer]:
    blueprint = Blueprint.open(resolve(options.model), Compute(options.dtype))
    writer = open_writer(
        blueprint,
        options.model,
        Cut(),
        cloud=[cloud.url for cloud in clouds],
        wire=options.wire,
        settings=LinkSettings(retries=30, longest_wait_s=2.0),
    )
    try:
        yield writer
    finally:
        writer.target.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--answers", type=int, default=24, help="in the suite, which is repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--gap", type=float, default=1.5, help="seconds between a restart and a kill, on average"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wire", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    clouds = [Cloud(options.model, options.dtype) for _ in range(2)]
    for cloud in clouds:
        cloud.wait_until_ready()
    try:
        report = measure(options, clouds)
    finally:
        for cloud in clouds:
            cloud.kill()
    print(json.dumps(report, indent=None if options.json else 1))
    sys.exit(report["identical"] != report["answers"])


def measure(options: argparse.Namespace, clouds: list[Cloud]) -> dict[str, Any]:
    with device(options, clouds) as writer:
        undisturbed = [
            write(writer, number, options.max_new_tokens).token_ids for number in range(options.answers)
        ]
        killer = Killer(writer, clouds, options.kills, options.gap, options.seed)
        killer.start()
        written, identical, reconnects, started = 0, 0, 0, time.monotonic()
        while not killer.done.is_set():
            writer.forget()
            answer = write(writer, written % options.answers, options.max_new_tokens)
            identical += answer.token_ids == undisturbed[written % options.answers]
            reconnects += answer.reconnects
            written += 1
        return {
            "kills": killer.kills,
            "answers": written,
            "identical": identical,
            "lost_in_an_answer": reconnects,
            "seconds": round(time.monotonic() - started, 1),
        }


if __name__ == "__main__":
    main()
