"""Many devices at one cloud: speed and waiting times by the number of devices, in one run.

Each device is a process with an emulated link of its own; all of them start once, and for every number of
devices so many of them write answers for some seconds. Numbers take turns, in alternating order, so that a
machine that gets slower slows all of them. Clients, links and cloud share this machine's processors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from aparte.address import parse_address
from aparte.config import Compute, Cut
from aparte.errors import AparteError, UserError
from aparte.measure.cloud_process import CloudProcess
from aparte.measure.doctor_path import Door
from aparte.measure.passes import Passes
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process
from aparte.speculate.settings import Decoding

#: Stands for the model in one piece among the numbers of devices.
UNSPLIT = 0


@dataclass(frozen=True)
class Load:
    """What to measure."""

    model: str
    cut: Cut
    compute: Compute
    link: WanProfile
    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    seconds: float = 10.0
    repeats: int = 2
    decode: str = "sequential"
    max_new_tokens: int = 64
    #: Also measure the model in one piece, and give the devices as many threads as they like.
    unsplit: bool = False

    def __post_init__(self) -> None:
        Decoding(self.decode)  # complains about an unknown one
        if not self.clients or min(self.clients) < 1:
            raise UserError("--clients needs numbers from 1 on, like 1,2,4,8.")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UserError(f"--seconds is {self.seconds}; it must be positive.")
        if self.repeats < 1:
            raise UserError(f"--repeats is {self.repeats}; it must be at least 1.")


@dataclass
class Row:
    """What so many clients got, over all repeats."""

    clients: int
    tok_s: list[float] = field(default_factory=list)  # of all clients together, by repeat
    steps: list[dict[str, float]] = field(default_factory=list)
    passes: Passes = field(default_factory=Passes)

    def to_json(self) -> dict[str, Any]:
        """Medians and 95th percentiles over all steps but the first of each answer; tok/s by median."""
        columns = {name: [step[name] for step in self.steps] for name in ("step_ms", "queue_ms", "cloud_ms")}
        return {
            "clients": self.clients,
            "tok_s": round(statistics.median(self.tok_s), 3),
            "step_p50_ms": _percentile(columns["step_ms"], 50),
            "step_p95_ms": _percentile(columns["step_ms"], 95),
            "queue_p50_ms": _percentile(columns["queue_ms"], 50),
            "queue_p95_ms": _percentile(columns["queue_ms"], 95),
            "cloud_p50_ms": _percentile(columns["cloud_ms"], 50),
            "cloud_p95_ms": _percentile(columns["cloud_ms"], 95),
            "steps": len(self.steps),
            "nodes_per_step": _mean([step["nodes"] for step in self.steps]),
            "tokens_per_step": _mean([step["tokens"] for step in self.steps]),
            **self.passes.to_json(),
        }


def measure(load: Load, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Run it all. ``identical`` says whether a prompt's answer was the same in every company."""
    rows = {count: Row(count) for count in load.clients}
    answers = _Answers()
    measured = (UNSPLIT, *load.clients) if load.unsplit else load.clients
    rounds = [
        count for repeat in range(load.repeats) for count in (measured if repeat % 2 == 0 else measured[::-1])
    ]
    unsplit: list[float] = []
    with running(load, progress) as devices:
        for done, count in enumerate(rounds):
            progress("rounds", done, len(rounds))
            if count == UNSPLIT:
                unsplit.append(devices.unsplit_tok_s(load.seconds))
                continue
            before = Passes.read(devices.cloud)
            results = together(devices.clients[:count], load.seconds)
            rows[count].passes += Passes.read(devices.cloud) - before
            rows[count].tok_s.append(sum(result["tokens"] for result in results) / load.seconds)
            for result in results:
                rows[count].steps += result["steps"]
                answers.add(result["answers"])
        progress("rounds", len(rounds), len(rounds))
    report = [row.to_json() for row in rows.values()]
    one = next((row for row in report if row["clients"] == 1), None)
    for row in report:
        row["ratio_to_one"] = round(row["tok_s"] / one["tok_s"], 3) if one and one["tok_s"] else None
    alone = statistics.median(unsplit) if unsplit else None
    return {
        "rows": report,
        "unsplit_tok_s": None if alone is None else round(alone, 3),
        "one_to_unsplit": round(one["tok_s"] / alone, 3) if one and alone else None,
        "identical": answers.identical,
        "answers": answers.count,
    }


class _Answers:
    """Checks that answers to the same prompt agree as far as each goes."""

    def __init__(self) -> None:
        self._longest: dict[int, list[int]] = {}
        self.identical = True
        self.count = 0

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        for answer in answers:
            self.count += 1
            known, tokens = self._longest.get(answer["prompt"], []), answer["token_ids"]
            shared = min(len(known), len(tokens))
            self.identical &= known[:shared] == tokens[:shared]
            if len(tokens) > len(known):
                self._longest[answer["prompt"]] = tokens


@dataclass(frozen=True)
class Devices:
    """What runs during a measurement."""

    cloud_pid: int
    cloud: Door
    clients: list[Client]
    unsplit: Client | None

    def unsplit_tok_s(self, seconds: float) -> float:
        """Speed of the model in one piece, with nothing else going on."""
        assert self.unsplit is not None
        (result,) = together([self.unsplit], seconds)
        return float(result["tokens"] / seconds)


@contextlib.contextmanager
def running(load: Load, progress: Callable[[str, int, int], None]) -> Iterator[Devices]:
    """A cloud, and as many devices as the largest round needs, each behind its own link."""
    most = max(load.clients)
    with contextlib.ExitStack() as stack:
        cloud = stack.enter_context(CloudProcess(load.model, load.cut, load.compute))
        door = Door(cloud.url(), cloud.token)
        address = parse_address(door.url.removeprefix("ws://"))
        clients = []
        for index in range(most):
            host, port = stack.enter_context(wan_process(address, load.link))
            url = f"ws://{host}:{port}"
            threads = None if load.unsplit else 1
            clients.append(stack.enter_context(Client(load, url, cloud.token, index, threads)))
        unsplit = stack.enter_context(Client(load, None, "", 0, None)) if load.unsplit else None
        for done, client in enumerate(clients):
            progress("starting devices", done, most)
            client.receive()
        progress("starting devices", most, most)
        if unsplit is not None:
            unsplit.receive()
        yield Devices(cloud.pid, door, clients, unsplit)


class Client:
    """A :mod:`aparte.measure.load_client` process."""

    def __init__(self, load: Load, url: str | None, token: str, index: int, threads: int | None = 1) -> None:
        """Without a ``url`` it runs the whole model. ``threads`` is None for as many as suit it."""
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", "aparte.measure.load_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "APARTE_TOKEN": token, **_threads(threads)},
            text=True,
            start_new_session=True,
        )
        self.send(
            {
                "model": load.model,
                "cut": str(load.cut),
                "dtype": load.compute.dtype,
                "device": load.compute.device,
                "url": url,
                "decode": load.decode,
                "max_new_tokens": load.max_new_tokens,
                "index": index,
            }
        )

    def send(self, line: object) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it died of is told by receive()
            self._child.stdin.write(json.dumps(line) + "\n")
            self._child.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Its next line. Raises :class:`AparteError` if it ended instead."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines() or ["it said nothing."]
            raise AparteError(f"A device of the measurement failed: {said[-1]}")
        received: dict[str, Any] = json.loads(line)
        return received

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _threads(count: int | None) -> dict[str, str]:
    """The environment of a process that computes with ``count`` threads, or as the commands do."""
    if count is not None:
        return {"OMP_NUM_THREADS": str(count)}
    return {"OMP_PROC_BIND": "true", "GOMP_SPINCOUNT": "10000"} if sys.platform == "linux" else {}


def together(clients: Sequence[Client], seconds: float) -> list[dict[str, Any]]:
    """Have all of them write for so long; what each got."""
    for client in clients:
        client.send(seconds)
    return [client.receive() for client in clients]


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that ``percent`` % of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 3)


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 3) if values else None
