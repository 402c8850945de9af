"""Many devices at one cloud for a while, and what becomes of its memory.

    .venv/bin/python benchmarks/soak.py                              # 10 minutes, 8 devices
    .venv/bin/python benchmarks/soak.py --model FOLDER --minutes 0.2 --clients 2 --json

Devices are processes. Each writes one answer after the other, every one in a session of its own. After a
warm-up the memory of the server's process has to stay within 2 % of what it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from typing import Any

from clouds import resident_bytes, say

from aparte.config import DEFAULT_MODEL, Compute, Cut
from aparte.measure.load import Load, running, together
from aparte.measure.wan_link import WanProfile

#: What the memory may differ by, after the warm-up.
FLAT = 0.02
ROUND_S = 20.0


class Sampler(threading.Thread):
    """The resident memory of a process, with times."""

    def __init__(self, pid: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._every_s = every_s
        self._began = time.monotonic()
        self._over = threading.Event()
        self.samples: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self._over.is_set():
            self.samples.append((time.monotonic() - self._began, resident_bytes(self._pid)))
            self._over.wait(self._every_s)

    def finish(self) -> None:
        self._over.set()
        self.join()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    load = Load(
        options.model,
        Cut(),
        Compute(options.dtype, "cpu"),
        WanProfile(rtt_ms=options.rtt),
        (options.clients,),
        decode=options.decode,
        max_new_tokens=options.max_new_tokens,
    )
    total_s, answers, tokens = options.minutes * 60, 0, 0
    with running(load, lambda label, done, total: None) as devices:
        sampler = Sampler(devices.cloud_pid, min(5.0, total_s / 40))
        sampler.start()
        started = time.monotonic()
        while (left_s := total_s - (time.monotonic() - started)) > 0:
            results = together(devices.clients, min(ROUND_S, max(1.0, left_s)))
            answers += sum(len(result["answers"]) for result in results)
            tokens += sum(result["tokens"] for result in results)
            size = sampler.samples[-1][1]
            say(f"{time.monotonic() - started:.0f} s, {answers} answers, {size / 1e6:.1f} MB")
        sampler.finish()
    return report_of(sampler.samples, total_s) | {
        "clients": options.clients,
        "minutes": options.minutes,
        "answers": answers,
        "tokens": tokens,
    }


def report_of(samples: list[tuple[float, int]], total_s: float) -> dict[str, Any]:
    """The memory after the first tenth: where it was at the start and the end, and how far it strayed."""
    settled = [(at, size) for at, size in samples if at >= total_s / 10] or samples
    sizes = [size for _, size in settled]
    tenth = max(1, len(sizes) // 10)
    first, last = statistics.median(sizes[:tenth]), statistics.median(sizes[-tenth:])
    by_tenth = [
        round(statistics.median(size for at, size in samples if low <= at / total_s * 10 < low + 1) / 1e6, 1)
        for low in range(10)
        if any(low <= at / total_s * 10 < low + 1 for at, _ in samples)
    ]
    return {
        "resident_mb": {
            "after_warm_up": round(first / 1e6, 1),
            "end": round(last / 1e6, 1),
            "least": round(min(sizes) / 1e6, 1),
            "most": round(max(sizes) / 1e6, 1),
            "by_tenth": by_tenth,
        },
        "growth": round(last / first - 1, 4),
        "spread": round(max(sizes) / min(sizes) - 1, 4),
        "flat": abs(last / first - 1) <= FLAT and max(sizes) / first - 1 <= FLAT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rtt", type=float, default=20.0, help="ms, of every device")
    parser.add_argument("--decode", default="sequential")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = measure(options)
    print(json.dumps(report, indent=None if options.json else 1))
    sys.exit(not report["flat"])


if __name__ == "__main__":
    main()
