"""``aparte serve --tensor-parallel 2``: two processes serve what one does, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aparte.cloud.ranks import Ranks
from aparte.cloud.serving import Served
from aparte.config import Compute, Cut, LinkSettings, Sampling, ServerLimits
from aparte.decode import Job, decode
from aparte.errors import LinkError, UserError
from aparte.model.parts import Blueprint
from aparte.recovery import Recovery
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing
from aparte.step import ROOT, Step, chain_parents
from aparte.target.split import DeviceParts, SplitTarget
from aparte.wire.frames import ErrorFrame, StepFrame
from cli.command import Command, start
from dialogue import PROMPT, fingerprint_of, open_link, raw_device, unsplit_tokens, wait_until
from drafters import RandomTrees
from processes import descendants
from running import FLOAT32

COUNT = 32


@pytest.fixture(scope="module")
def served(llama_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    child = start(
        *("serve", llama_folder, "--tensor-parallel", 2, "--port", 0, "--json", "--dtype", "float32"),
        *("--exit-with-parent", os.getpid()),
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        pytest.fail(child.communicate()[1][-2000:])
    yield child, json.loads(line)["listening"]
    child.kill()
    child.wait()


def tokens(folder: Path, url: str, drafter: Drafter, settings: LinkSettings | None = None) -> list[int]:
    link = open_link(folder, url)
    target = SplitTarget(DeviceParts(Blueprint.open(folder, FLOAT32), Cut()), link, "float32")
    recovery = Recovery(settings)
    job = Job(PROMPT, Sampling(), COUNT, frozenset(), 8, recovery=recovery)
    found = [token for block in decode(target, Session(), drafter, job) for token in block.tokens]
    target.close()
    return found


@pytest.mark.parametrize("setting", ["batch_invariant", "graphs"])
def test_settings_that_ranks_cannot_keep(llama_folder: Path, setting: str) -> None:
    served = Served(str(llama_folder), Cut(), Compute("float32", **{setting: True}), ServerLimits(), ranks=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="with --tensor-parallel"):
        Ranks(served, Blueprint.open(llama_folder, FLOAT32))


@pytest.mark.parametrize("drafts", [False, True], ids=["sequential", "trees"])
def test_the_text_is_that_of_one_process(
    served: tuple[subprocess.Popen[str], str], llama_folder: Path, drafts: bool
) -> None:
    """Random trees are mostly rejected, so that steps take nodes back, in both processes."""
    truth = unsplit_tokens(llama_folder, PROMPT, COUNT)
    drafter = RandomTrees([*PROMPT, *truth]) if drafts else Nothing()
    assert tokens(llama_folder, served[1], drafter) == truth


def test_one_session_s_mistake_is_its_own(
    served: tuple[subprocess.Popen[str], str], llama_folder: Path
) -> None:
    with raw_device(served[1], fingerprint_of(llama_folder)) as device:
        device.step(1, ROOT, 4)
        device.receive()
        lost = Step(2, 0, 77, 80, chain_parents(77, 80, 1))  # below a node that nobody has
        device.send(StepFrame(lost, bytes(32 * 4)))
        frame = device.receive()
        assert isinstance(frame, ErrorFrame)
        assert frame.code == "slot"
    assert tokens(llama_folder, served[1], Nothing()) == unsplit_tokens(llama_folder, PROMPT, COUNT)


def test_they_end_together_and_say_so(served: tuple[subprocess.Popen[str], str], llama_folder: Path) -> None:
    """Last of all: whoever started the server starts it again, and devices go on."""
    child, url = served
    others = [pid for pid in descendants(child.pid) if pid != child.pid]
    assert len(others) == 1
    os.kill(others[0], signal.SIGKILL)
    assert child.wait(30) == 1
    assert child.stderr is not None
    said = child.stderr.read()
    assert "Process 1 of the 2 that share the layers is gone (exit code -9)" in said
    assert "Traceback" not in said
    with pytest.raises(LinkError, match="cannot be reached"):
        tokens(llama_folder, url, Nothing())


@pytest.mark.slow
def test_they_end_with_the_server(llama_folder: Path) -> None:
    child = start("serve", llama_folder, "--tensor-parallel", 2, "--port", 0, "--json", "--dtype", "float32")
    assert child.stdout is not None
    assert child.stdout.readline()
    (other,) = (pid for pid in descendants(child.pid) if pid != child.pid)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 0
    assert "Error" not in said
    wait_until(lambda: not Path(f"/proc/{other}/cmdline").exists(), 20)


def test_heads_that_cannot_be_divided(aparte: Command, llama_folder: Path) -> None:
    result = aparte("serve", llama_folder, "--tensor-parallel", 3)
    assert result.code == 2
    assert "it has 4 attention heads, and 4 is not divisible by 3" in result.err
