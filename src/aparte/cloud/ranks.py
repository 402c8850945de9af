"""The processes among which the layers are split, seen from the one with the sockets (rank 0).

The others (:mod:`aparte.cloud.rank_process`) do what rank 0 does, in the same order: for every pass they are
told the steps, over their standard input, and get the hidden states, by a broadcast. All keep a cache for
every session, each with its own heads. Whether a step fits is decided by its slots, so all decide alike.

The processes live and die together. If one is gone the others could only wait for it, so this process ends at
once and says why. Whoever started it starts it again, and devices prefill: nothing here is worth keeping.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aparte.errors import AparteError, SlotError, UserError
from aparte.model.cache import SlotCache
from aparte.model.slab import Slab
from aparte.model.stage import Item, Output, Stage
from aparte.model.tensor_parallel import Split

if TYPE_CHECKING:
    from aparte.cloud.serving import Served
    from aparte.model.parts import Blueprint

log = logging.getLogger(__name__)

#: How long ranks wait for each other. A pass takes much less, and loading a large model may take minutes.
TIMEOUT = timedelta(minutes=10)


class Ranks:
    """Starts the other processes for ``served``; :attr:`split` is what this one has of each layer."""

    def __init__(self, served: Served, blueprint: Blueprint) -> None:
        """Returns when all have loaded their share. Raises what keeps one of them from it."""
        self._size = served.ranks
        device = blueprint.precision.device
        if device.type == "cuda" and torch.cuda.device_count() < self._size:
            raise UserError(
                f"--tensor-parallel {self._size} needs {self._size} GPUs; this machine shows "
                f"{torch.cuda.device_count()}."
            )
        if served.compute.batch_invariant:
            raise UserError(
                "--batch-invariant has no effect with --tensor-parallel: the order in which ranks are summed "
                "is the network's. Leave one of them out."
            )
        if served.compute.graphs:
            raise UserError("--graphs has no effect with --tensor-parallel. Leave one of them out.")
        self.split: Split = _Leader(self, self._size)
        self.split.check(blueprint)
        self._closing = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="aparte-ranks-")
        place = str(Path(self._folder.name) / "meet")
        told = {
            "model": served.model,
            "cut": None if served.cut is None else str(served.cut),
            "compute": [served.compute.dtype, device.type, served.compute.kv],
            "device": device.type,
            "size": self._size,
            "meet": place,
        }
        if device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // self._size))
        self._others = [_start(rank, self._size, device) for rank in range(1, self._size)]
        #: Sessions that have ended since the last pass.
        self._dropped: deque[int] = deque()
        self._end = weakref.finalize(self, _end, self._closing, self._others, self._folder)
        for rank, other in enumerate(self._others, start=1):
            self._tell(other, {**told, "rank": rank, "threads": torch.get_num_threads()})
            threading.Thread(target=self._watch, args=(rank, other), daemon=True).start()
        meet(0, self._size, place, device)

    def wait(self) -> None:
        """Until the others have loaded. Raises :class:`AparteError` with what one of them says instead."""
        for rank, other in enumerate(self._others, start=1):
            assert other.stdout is not None
            line = other.stdout.readline()
            error = json.loads(line).get("error") if line else "it ended."
            if error:
                self.close()
                raise AparteError(f"Process {rank} of {self._size} cannot load its share: {error}")

    def dropped(self, number: int) -> None:
        """The cache ``number`` is gone here; the others learn of it with the next pass."""
        self._dropped.append(number)

    def announce(
        self, items: Sequence[tuple[tuple[int, int], Item]], device: torch.device, *, shared: bool
    ) -> None:
        """Tell the others about a pass over caches, each by its number and ``max_pending``."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        told = {
            "drop": dropped,
            "shared": shared,
            "width": items[0][1].hidden.shape[1],
            "items": [
                [*cache, item.tap, item.step.number, item.step.epoch, item.step.commit, item.step.base]
                for cache, item in items
            ],
            "parents": [item.step.parents for _, item in items],
        }
        for other in self._others:
            self._tell(other, told)
        hidden = torch.cat([item.hidden.float() for _, item in items]).to(device)
        dist.broadcast(hidden, src=0)

    def fail(self, reason: str) -> None:
        """End this process, whatever it is doing: a thread that waits for a rank can't be called back."""
        if not self._closing.is_set():
            self._closing.set()
            log.error("%s; the server ends. Start it again: devices connect anew and go on.", reason)
            for handler in logging.getLogger().handlers:
                handler.flush()
            print(f"Error: {reason}; the server ends.", file=sys.stderr, flush=True)  # noqa: T201
            for other in self._others:
                with contextlib.suppress(OSError):
                    other.kill()
            os._exit(1)

    def close(self) -> None:
        """End the others."""
        self._end()

    def _watch(self, rank: int, other: subprocess.Popen[str]) -> None:
        code = other.wait()
        self.fail(f"Process {rank} of the {self._size} that share the layers is gone (exit code {code})")

    def _tell(self, other: subprocess.Popen[str], told: dict[str, Any]) -> None:
        assert other.stdin is not None
        try:
            other.stdin.write(json.dumps(told) + "\n")
            other.stdin.flush()
        except OSError:
            self.fail("One of the processes that share the layers is gone")


class _Leader(Split):
    """Rank 0."""

    def __init__(self, ranks: Ranks, size: int) -> None:
        super().__init__(0, size)
        self._ranks = ranks

    def lead(self, stage: Stage) -> Stage:
        return LeadingStage(stage, self._ranks)


class LeadingStage(Stage):
    """Rank 0's share of a stage. Before each pass it tells the others."""

    def __init__(self, stage: Stage, ranks: Ranks) -> None:
        self.__dict__.update(stage.__dict__)  # the same stage, seen from here
        self._ranks = ranks
        self._caches: weakref.WeakKeyDictionary[SlotCache, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._next = 0
        ranks.wait()

    def new_cache(self, max_pending: int = 4096, slab: Slab | None = None) -> SlotCache:
        cache = super().new_cache(max_pending, slab)
        number, self._next = self._next, self._next + 1
        self._caches[cache] = (number, max_pending)
        weakref.finalize(cache, self._ranks.dropped, number).atexit = False
        return cache

    def forward_one(self, item: Item) -> Output:
        self._announce([item], shared=False)
        try:
            return super().forward_one(item)
        except SlotError:  # the others find the same
            raise
        except Exception as error:
            self._ranks.fail(f"A pass over split layers failed here ({type(error).__name__})")
            raise

    def forward_many(self, items: Sequence[Item]) -> list[Output | Exception]:
        self._announce(items, shared=True)
        try:
            return super().forward_many(items)
        except Exception as error:
            self._ranks.fail(f"A pass over split layers failed here ({type(error).__name__})")
            raise

    def _announce(self, items: Sequence[Item], *, shared: bool) -> None:
        numbered = [(self._caches[item.cache], item) for item in items]
        self._ranks.announce(numbered, self.device, shared=shared)


def meet(rank: int, size: int, place: str, device: torch.device) -> None:
    """Join the process group; over loopback, because all ranks are on one machine."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )


def _start(rank: int, size: int, device: torch.device) -> subprocess.Popen[str]:
    settings = dict(os.environ)
    if device.type == "cuda":
        # Each sees one GPU only: the one with its number among those that this process sees.
        seen = settings.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(number) for number in range(size)]
        settings["CUDA_VISIBLE_DEVICES"] = names[rank]
    return subprocess.Popen(
        [sys.executable, "-m", "aparte.cloud.rank_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=settings,
        text=True,
        start_new_session=True,  # Ctrl-C is for rank 0; the others end with their standard input
    )


def _end(
    closing: threading.Event, others: list[subprocess.Popen[str]], folder: tempfile.TemporaryDirectory[str]
) -> None:
    closing.set()
    for other in others:
        for pipe in (other.stdin, other.stdout):
            _close(pipe)
    for other in others:
        try:
            other.wait(timeout=5)
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    folder.cleanup()


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()
