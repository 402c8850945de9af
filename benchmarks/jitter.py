"""Write answers over a bad link, and compare each with that of an undisturbed one.

    .venv/bin/python benchmarks/jitter.py                            # 60 s, the default model
    .venv/bin/python benchmarks/jitter.py --model FOLDER --seconds 5 --json

Every device has a link of its own: 20 ms round trip, up to 80 ms more each way at random (the WAN emulator),
and in front of it a relay that stalls for up to three seconds and resets connections: one step in a hundred
loses its connection. Answers are greedy and sampled, one token at a time and with drafts sent ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from typing import Any

from chaos import Chaos, Weather
from clouds import Cloud, say
from kills import WAYS, write

from aparte.address import LOOPBACK
from aparte.answer import Writer
from aparte.config import DEFAULT_MODEL, Compute, Cut, LinkSettings
from aparte.device import open_writer
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve


class Device(threading.Thread):
    """Writes one answer after the other until its time is over, and finishes the last one."""

    def __init__(
        self, writer: Writer, first: int, expected: list[list[int]], options: argparse.Namespace
    ) -> None:
        super().__init__(daemon=True)
        self._writer = writer
        self._next = first
        self._expected = expected
        self._options = options
        self.answers = self.identical = self.failed = self.reconnects = 0
        self.longest_s = 0.0
        self.failures: list[str] = []

    def run(self) -> None:
        ends = time.monotonic() + self._options.seconds
        while time.monotonic() < ends:
            number = self._next % len(self._expected)
            self._next += 1
            self._writer.forget()
            started = time.monotonic()
            try:
                answer = write(self._writer, number, self._options.max_new_tokens)
            except Exception as error:
                self.failed += 1
                self.failures.append(str(error))
                continue
            self.answers += 1
            self.identical += answer.token_ids == self._expected[number]
            self.reconnects += answer.reconnects
            self.longest_s = max(self.longest_s, time.monotonic() - started)


def measure(options: argparse.Namespace, cloud: Cloud) -> dict[str, Any]:
    blueprint = Blueprint.open(resolve(options.model), Compute(options.dtype))

    def connect(url: str) -> Writer:
        return open_writer(
            blueprint,
            options.model,
            Cut(),
            cloud=url,
            wire="float32",
            settings=LinkSettings(retries=30, longest_wait_s=2.0),
        )

    quiet = connect(cloud.url)
    expected = []
    for number in range(options.answers):
        quiet.forget()
        expected.append(write(quiet, number, options.max_new_tokens).token_ids)
    quiet.target.close()
    # A piece passes up and one down per step, each with half of its chance.
    weather = Weather(reset=options.resets / 2, stall=options.stalls / 2)
    with contextlib.ExitStack() as stack:
        devices, relays = [], []
        for index in range(options.clients):
            near = stack.enter_context(
                wan_process((LOOPBACK, cloud.port), WanProfile(rtt_ms=20, jitter_ms=80))
            )
            relays.append(stack.enter_context(Chaos(near, weather, options.seed + index).running()))
            writer = connect(f"ws://{LOOPBACK}:{relays[-1].port}")
            stack.callback(writer.target.close)
            devices.append(Device(writer, index * len(WAYS), expected, options))
        started = time.monotonic()
        for device in devices:
            device.start()
        for device in devices:
            device.join()
        seconds = time.monotonic() - started
        for failure in (failure for device in devices for failure in device.failures):
            say(failure)
        return {
            "clients": options.clients,
            "seconds": round(seconds, 1),
            "answers": sum(device.answers for device in devices),
            "identical": sum(device.identical for device in devices),
            "failed": sum(device.failed for device in devices),
            "resets": sum(relay.resets for relay in relays),
            "stalls": sum(relay.stalls for relay in relays),
            "pieces": sum(relay.pieces for relay in relays),
            "lost_in_an_answer": sum(device.reconnects for device in devices),
            "longest_answer_s": round(max(device.longest_s for device in devices), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--answers", type=int, default=12, help="in the suite, which is repeated")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--resets", type=float, default=0.01, help="chance per step")
    parser.add_argument("--stalls", type=float, default=0.01, help="chance per step")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cloud = Cloud(options.model, options.dtype)
    cloud.wait_until_ready()
    try:
        report = measure(options, cloud)
    finally:
        cloud.kill()
    print(json.dumps(report, indent=None if options.json else 1))
    sys.exit(report["failed"] > 0 or report["identical"] != report["answers"] or not report["answers"])


if __name__ == "__main__":
    main()
