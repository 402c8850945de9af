"""A process with a share of every layer; started by :mod:`aparte.cloud.ranks`, which it follows.

Lines of JSON on standard input say what to do: first what to load, then one line per pass. It ends when its
standard input does. A step that does not fit is an error for rank 0 to tell; here it is only skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import IO, Any


def main() -> None:
    told = json.loads(sys.stdin.readline() or "null")
    if told is None:
        return
    out, sys.stdout = sys.stdout, sys.stderr  # nothing but our lines goes to rank 0
    rank = Follower(told)
    try:
        rank.load()
    except Exception as error:
        _say(out, {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
        sys.stdin.read()  # to the end: rank 0 reads what was said before it sees that we are gone
        os._exit(1)
    _say(out, {"ready": True})
    try:
        for line in sys.stdin:
            rank.follow(json.loads(line))
    except Exception as error:  # its text may hold numbers that nobody should see
        print(f"A rank failed in a pass: {type(error).__name__}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)
    # Rank 0 is gone, or has no more use for us. The process group would wait for it.
    os._exit(0)


class Follower:
    """The share of one rank, and a cache for each session that rank 0 has."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._caches: dict[int, Any] = {}

    def load(self) -> None:
        import torch

        from aparte.cloud.ranks import meet
        from aparte.config import Compute, Cut
        from aparte.model.needed import needed_by_cloud
        from aparte.model.parts import Blueprint
        from aparte.model.registry import resolve
        from aparte.model.tensor_parallel import Split

        told = self._told
        torch.set_num_threads(told["threads"])
        torch.set_grad_enabled(False)
        cut = None if told["cut"] is None else Cut.parse(told["cut"])
        needed = None if cut is None else needed_by_cloud(cut)
        meet(told["rank"], told["size"], told["meet"], torch.device(told["device"]))
        folder = resolve(told["model"], wanted=needed, tokenizer=False)
        blueprint = Blueprint.open(folder, Compute(*told["compute"]))
        blueprint.split = Split(told["rank"], told["size"])
        layers = range(blueprint.layers) if cut is None else cut.middle(blueprint.layers)
        self._stage = blueprint.stage(layers)

    def follow(self, told: dict[str, Any]) -> None:
        """One pass, like rank 0's."""
        import torch
        import torch.distributed as dist

        from aparte.errors import SlotError
        from aparte.model.stage import Item
        from aparte.step import Step

        for number in told["drop"]:
            self._caches.pop(number, None)
        rows = [len(parents) for parents in told["parents"]]
        hidden = torch.empty(sum(rows), told["width"], device=self._stage.device)
        dist.broadcast(hidden, src=0)
        items = []
        for (cache, pending, tap, number, epoch, commit, base), parents, own in zip(
            told["items"], told["parents"], torch.split(hidden, rows), strict=True
        ):
            if cache not in self._caches:
                self._caches[cache] = self._stage.new_cache(pending)
            step = Step(number, epoch, commit, base, tuple(parents))
            items.append(Item(self._caches[cache], step, own, tap))
        if told["shared"]:
            self._stage.forward_many(items)
            return
        with contextlib.suppress(SlotError):  # rank 0 finds the same, and tells its session
            self._stage.forward_one(items[0])


def _say(out: IO[str], told: dict[str, Any]) -> None:
    out.write(json.dumps(told) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
