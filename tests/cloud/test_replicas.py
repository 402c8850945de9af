"""``aparte serve --ray``: replicas behind one address, one of which may die at any time.

One cluster for the whole file: starting Ray takes several seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aparte.config import Cut, LinkSettings, Sampling
from aparte.decode import Job, decode
from aparte.model.parts import Blueprint
from aparte.recovery import Recovery
from aparte.session import Session
from aparte.speculate.drafter import Nothing
from aparte.step import ROOT
from aparte.target.split import DeviceParts, SplitTarget
from aparte.wire.frames import ErrorFrame, ResultFrame
from cli.command import Command, start
from cloud.test_asgi import get
from dialogue import PROMPT, fingerprint_of, open_link, raw_device, unsplit_tokens, wait_until
from processes import descendants, listening
from running import FLOAT32

pytest.importorskip("ray.serve", reason="Ray Serve is not installed (pip install 'aparte[ray]')")

pytestmark = pytest.mark.timeout(900)  # on a machine that does other things, Ray takes its time to start

TOKEN = "open-sesame"
COUNT = 48


@dataclass
class Cluster:
    """The command, its address, and what it has said so far."""

    child: subprocess.Popen[str]
    url: str
    replicas: int
    said: list[str] = field(default_factory=list)

    def listen(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.said.append(line)

    def hosts(self) -> list[int]:
        """Processes of replicas in which sessions were opened, one entry per session."""
        found = (re.search(r"session_start .*replica (\d+)", line) for line in tuple(self.said))
        return [int(match[1]) for match in found if match]


@contextlib.contextmanager
def watched(child: subprocess.Popen[str]) -> Iterator[Cluster]:
    """The cluster that ``child`` starts, until it is stopped in order and without a traceback."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        pytest.fail(f"no replicas: {child.communicate()[1][-2000:]}")
    ready = json.loads(line)
    cluster = Cluster(child, ready["listening"], ready["replicas"])
    threading.Thread(target=cluster.listen, daemon=True).start()
    yield cluster
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert "Traceback" not in "".join(cluster.said)


@pytest.fixture(scope="module")
def cluster(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    secret = tmp_path_factory.mktemp("ray") / "token"
    secret.write_text(TOKEN)
    child = start(
        *("serve", llama_folder, "--ray", "--replicas", 2, "--port", 0, "--json", "--dtype", "float32"),
        *("--token-file", secret, "--exit-with-parent", os.getpid()),
    )
    with watched(child) as cluster:
        yield cluster
    assert TOKEN not in "".join(cluster.said)


def test_it_says_what_is_served(cluster: Cluster) -> None:
    assert cluster.replicas == 2
    assert cluster.url.startswith("ws://127.0.0.1:")
    status, _, body = get(cluster.url, "/health")
    assert status == 200
    assert json.loads(body)["status"] == "ok"


def test_the_door_is_that_of_a_single_server(cluster: Cluster, llama_folder: Path) -> None:
    assert get(cluster.url, "/")[0] == 401
    with raw_device(cluster.url, fingerprint_of(llama_folder), TOKEN) as device:
        device.step(1, ROOT, 5)
        assert isinstance(device.receive(), ResultFrame)
        device.send(b"\0\0\0\3{}}")
        frame = device.receive()
        assert isinstance(frame, ErrorFrame)
        assert frame.code == "frame"
    wait_until(lambda: len(cluster.hosts()) >= 1, 60)  # Ray brings what replicas log when it gets to it


def test_nothing_listens_where_other_machines_could_reach_it(cluster: Cluster) -> None:
    family = descendants(cluster.child.pid)
    assert len(family) >= 5  # Ray's own processes, the proxy and two replicas
    reachable = [address for pid in family for address in listening(pid) if not address.startswith("127.")]
    assert reachable == []


def test_a_replica_is_killed_and_the_answer_goes_on(cluster: Cluster, llama_folder: Path) -> None:
    """The point of it all: not one token differs, and the other replica takes over."""
    before = len(cluster.hosts())
    link = open_link(llama_folder, cluster.url, token=TOKEN)
    target = SplitTarget(DeviceParts(Blueprint.open(llama_folder, FLOAT32), Cut()), link, "float32")
    recovery = Recovery(LinkSettings(retries=12, first_wait_s=0.01, longest_wait_s=2.0))
    job = Job(PROMPT, Sampling(), COUNT, frozenset(), 1, recovery=recovery)
    tokens: list[int] = []
    killed: list[int] = []
    for block in decode(target, Session(), Nothing(), job):
        tokens += block.tokens
        if len(tokens) >= COUNT // 2 and not killed:
            wait_until(lambda: len(cluster.hosts()) > before, 60)
            killed.append(cluster.hosts()[before])
            os.kill(killed[0], signal.SIGKILL)
    target.close()
    assert tokens == unsplit_tokens(llama_folder, PROMPT, COUNT)
    assert recovery.lost >= 1
    wait_until(lambda: cluster.hosts()[-1] not in killed, 60)
    assert cluster.child.poll() is None


def test_options_that_make_no_sense(aparte: Command, llama_folder: Path) -> None:
    result = aparte("serve", llama_folder, "--ray", "--replicas", "none")
    assert result.code == 2
    assert "--replicas none is no number of replicas" in result.err
    result = aparte("serve", llama_folder, "--replicas", "2")
    assert result.code == 2
    assert "Give --ray too" in result.err
    result = aparte("serve", llama_folder, "--ray", "--cut", "4,4")
    assert result.code == 2
    assert "leaves nothing for the cloud" in result.err
