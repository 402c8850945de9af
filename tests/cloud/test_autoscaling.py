"""``aparte serve --ray --replicas auto``: another replica comes with the load and goes when it is over.

The times after which it does are shorter here than a user's; all else is the command.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aparte.config import LinkSettings
from aparte.fingerprint import Fingerprint
from aparte.recovery import Recovery
from aparte.step import ROOT
from aparte.wire.frames import ResultFrame
from cloud.test_replicas import Cluster, watched
from dialogue import (
    PROMPT,
    Device,
    RawDevice,
    fingerprint_of,
    open_link,
    raw_device,
    unsplit_tokens,
    wait_until,
)

pytest.importorskip("ray.serve", reason="Ray Serve is not installed (pip install 'aparte[ray]')")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: The command with other times, in an interpreter of its own.
QUICKLY = """
from aparte.cloud import capacity
capacity.LOOK_BACK_S, capacity.UP_AFTER_S, capacity.DOWN_AFTER_S = 4.0, 2.0, 20.0
from aparte.cli.app import main
main()
"""
COUNT = 40
#: Devices that send more than is answered, and how many steps each has under way.
CROWD, UNDER_WAY = 3, 8
NODES = 300


@pytest.fixture
def cluster(llama_folder: Path) -> Iterator[Cluster]:
    command = ("serve", llama_folder, "--ray", "--replicas", "auto", "--port", 0, "--json")
    command += ("--dtype", "float32")
    child = subprocess.Popen(
        [sys.executable, "-c", QUICKLY, *map(str, command), "--exit-with-parent", str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"},
    )
    with watched(child) as cluster:
        yield cluster


@contextlib.contextmanager
def crowd(url: str, fingerprint: Fingerprint) -> Iterator[None]:
    """Devices that always have steps under way, so that there is a queue."""
    over = threading.Event()
    failures: list[str] = []

    def play() -> None:
        with raw_device(url, fingerprint) as device:
            sent = answered = 0
            while not over.is_set():
                while sent - answered < UNDER_WAY:
                    sent += 1
                    device.step(sent, ROOT, NODES)
                frame = device.receive(60)
                answered += 1
                if not isinstance(frame, ResultFrame):
                    failures.append(repr(frame))
                    return

    threads = [threading.Thread(target=play) for _ in range(CROWD)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert failures == []


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


class Steady:
    """A session that goes on, a node at a time; any other replica would not know its slots."""

    def __init__(self, url: str, fingerprint: Fingerprint) -> None:
        self.device = RawDevice(url)
        self.device.greet(fingerprint)
        self._tip = ROOT

    def step(self) -> None:
        self.device.step(self._tip + 2, self._tip)
        assert isinstance(self.device.receive(60), ResultFrame)
        self._tip += 1


def test_a_replica_comes_with_the_load_and_goes_without(cluster: Cluster, llama_folder: Path) -> None:
    assert cluster.replicas == 1
    fingerprint, url = fingerprint_of(llama_folder), cluster.url
    steady = Steady(url, fingerprint)
    steady.step()
    wait_until(lambda: len(cluster.hosts()) == 1, 60)
    (first,) = cluster.hosts()

    def second() -> int | None:
        """A newcomer says where it was let in."""
        before = len(cluster.hosts())
        with raw_device(url, fingerprint):
            wait_until(lambda: len(cluster.hosts()) > before, 60)
        steady.step()
        return next((host for host in cluster.hosts() if host != first), None)

    with crowd(url, fingerprint):
        wait_until(lambda: second() is not None, 240)
        for _ in range(5):
            steady.step()
    other = second()
    assert other is not None
    assert is_alive(first)
    assert is_alive(other)

    # An answer in each of the two, in the middle, when one of them has to go.
    answers, hosts = [], set[int]()
    while hosts != {first, other}:
        assert len(answers) < 8, "newcomers go to one of the two only"
        before = len(cluster.hosts())
        device = Device(llama_folder, open_link(llama_folder, url))
        recovery = Recovery(LinkSettings(retries=20, first_wait_s=0.01, longest_wait_s=2.0))
        blocks = device.blocks(PROMPT, COUNT, recovery=recovery)
        tokens = [token for _ in range(COUNT // 2) for token in next(blocks).tokens]
        answers.append((device, recovery, blocks, tokens))
        wait_until(lambda before=before: len(cluster.hosts()) > before, 60)  # type: ignore[misc]
        hosts.add(cluster.hosts()[before])
    steady.device.close()
    wait_until(lambda: is_alive(first) + is_alive(other) == 1, 240)
    for device, _, blocks, tokens in answers:
        tokens += [token for block in blocks for token in block.tokens]
        device.target.close()
        assert tokens == unsplit_tokens(llama_folder, PROMPT, COUNT)
    lost = [recovery.lost for _, recovery, _, _ in answers]
    assert max(lost) >= 1, "one of them went on elsewhere"
    assert min(lost) == 0, "and one stayed where it was"
    assert cluster.child.poll() is None
