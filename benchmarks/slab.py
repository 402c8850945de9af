"""What handing buffers on from session to session brings, and what pages would cost.

    .venv/bin/python benchmarks/slab.py
    .venv/bin/python benchmarks/slab.py --sessions 50 --json

Sessions of mixed lengths, several of them at a time, come and go in caches of the default model's middle.
Nothing is computed: rows are only stored, so that what is measured is memory. Buffers come from a slab, or
each anew from the system, or from the C library. Each runs in a process of its own, in turns. The second part
is one node's attention over a cache, whose rows lie side by side or in pages that have to be gathered first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from clouds import resident_bytes
from torch import nn

import aparte.model.slab
from aparte.cloud.memory import _give_back
from aparte.model.attention import shared_heads
from aparte.model.cache import SlotCache
from aparte.model.slab import Slab
from aparte.step import ROOT, Step, chain_parents

#: The middle of the default model: 30 layers less two at each end.
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 26, 9, 3, 64
#: Where buffers come from: the slab, mapped anew each time, or the C library's heap.
KINDS = ("slab", "mapped", "heap")
#: Rows that a session stores at a time.
PIECE = 64
PAGE_ROWS = 16
CONTEXTS = (256, 1024, 4096)


def sessions(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let sessions come and go; ``kind`` is one of :data:`KINDS`."""
    if kind == "heap":
        aparte.model.slab.allocate = lambda shape, dtype, device: torch.zeros(
            shape, dtype=dtype, device=device
        )
    slab, chance = Slab(keep=kind == "slab"), random.Random(options.seed)
    new = torch.randn(1, KV_HEADS, PIECE, HEAD_DIM)
    alive: list[SlotCache] = []
    most = spent_s = 0.0
    before = resident_bytes(os.getpid())
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(options.sessions):
        if len(alive) == options.alive:
            alive.pop(chance.randrange(options.alive)).close()
        rows = chance.randint(30, 250) if chance.random() < 0.7 else chance.randint(250, 1500)
        started = time.process_time()
        alive.append(filled(slab, rows, new))
        spent_s += time.process_time() - started
        most = max(most, resident_bytes(os.getpid()) - before)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    for cache in alive:
        cache.close()
    ended = resident_bytes(os.getpid()) - before
    slab.trim()
    _give_back()
    return {
        "ms_per_session": round(spent_s * 1e3 / options.sessions, 3),
        "faults_per_session": round(faults / options.sessions, 1),
        "peak_mb": round(slab.peak / 1e6, 1),
        "resident_most_mb": round(most / 1e6, 1),
        "resident_all_ended_mb": round(ended / 1e6, 1),
        "resident_trimmed_mb": round((resident_bytes(os.getpid()) - before) / 1e6, 1),
    }


def filled(slab: Slab, rows: int, new: torch.Tensor) -> SlotCache:
    """A cache that was given so many rows: half of them as one prompt in pieces, then the rest."""
    cache = SlotCache(0, LAYERS, 8192, slab=slab)
    cache.expect(rows // 2)
    for start in range(0, rows, PIECE):
        count = min(PIECE, rows - start)
        tip = start - 1 if start else ROOT
        cache.begin(Step(0, 0, tip, start, chain_parents(tip, start, count)))
        for layer in range(LAYERS):
            cache.update(new[:, :, :count], new[:, :, :count], layer)
        cache.end()
    return cache


@torch.inference_mode()
def pages(context: int, repeats: int) -> dict[str, Any]:
    """Attention of one node in all layers, ms of one processor: rows side by side, and gathered from pages in
    random order."""
    query, module = torch.randn(1, HEADS, 1, HEAD_DIM), nn.Module()
    whole = [torch.randn(1, KV_HEADS, context, HEAD_DIM) for _ in range(2 * LAYERS)]
    count = context // PAGE_ROWS
    order = torch.randperm(count)
    paged = [torch.randn(count, KV_HEADS, PAGE_ROWS, HEAD_DIM) for _ in range(2 * LAYERS)]

    def gathered(part: torch.Tensor) -> torch.Tensor:
        return part[order].transpose(0, 1).reshape(1, KV_HEADS, context, HEAD_DIM)

    def timed(get: Any, parts: list[torch.Tensor]) -> float:
        started = time.process_time()
        for layer in range(LAYERS):
            shared_heads(module, query, get(parts[2 * layer]), get(parts[2 * layer + 1]), None, 0.125)
        return (time.process_time() - started) * 1e3

    times: dict[str, list[float]] = {"side_by_side_ms": [], "pages_ms": []}
    for _ in range(repeats):
        times["side_by_side_ms"].append(timed(lambda part: part, whole))
        times["pages_ms"].append(timed(gathered, paged))
    return {"context": context} | {name: round(statistics.median(all_), 3) for name, all_ in times.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for repeat in range(options.repeats):
        for kind in KINDS if repeat % 2 == 0 else KINDS[::-1]:
            words = ["--sessions", options.sessions, "--alive", options.alive, "--seed", options.seed]
            run = subprocess.run(
                [sys.executable, __file__, *map(str, words), "--only", kind],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found[kind].append(json.loads(run.stdout))
    return {
        "sessions": options.sessions,
        "alive": options.alive,
        "repeats": options.repeats,
        "seed": options.seed,
        "buffers": {
            kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for kind, runs in found.items()
        },
        "pages": [pages(context, 10 * options.repeats) for context in CONTEXTS],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--alive", type=int, default=16, help="at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        print(json.dumps(sessions(options.only, options)))
        return
    print(json.dumps(measure(options), indent=None if options.json else 1))


if __name__ == "__main__":
    main()
