"""The WAN emulator as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator

from aparte.address import format_address, parse_address
from aparte.errors import AparteError
from aparte.measure.wan_link import WanProfile


@contextlib.contextmanager
def wan_process(
    to: tuple[str, int], profile: WanProfile, *, start_timeout_s: float = 30
) -> Iterator[tuple[str, int]]:
    """Run ``aparte wan`` in front of ``to`` as a child process; gives the host and port to connect to.

    A process of its own keeps the relay's timing clear of this process's interpreter lock. It ends
    with the block, and by itself should this process die.
    """
    command = [sys.executable, "-m", "aparte", "wan", "--json", "--listen", "0", "--to", format_address(to)]
    command += ["--exit-with-parent", str(os.getpid()), "--rtt", str(profile.rtt_ms)]
    command += ["--jitter", str(profile.jitter_ms)]
    if profile.mbps is not None:
        command += ["--mbps", str(profile.mbps)]
    if profile.drop_after is not None:
        command += ["--drop-after", str(profile.drop_after)]
    # A session of its own: Ctrl-C is for the parent, which ends the child when it is done with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            yield _read_address(child, start_timeout_s)
        finally:
            child.terminate()
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()


def _read_address(child: subprocess.Popen[str], timeout_s: float) -> tuple[str, int]:
    """The address in the one JSON line that ``aparte wan --json`` prints when it is ready."""
    assert child.stdout is not None
    assert child.stderr is not None
    ready, _, _ = select.select([child.stdout], [], [], timeout_s)
    if not ready:
        raise AparteError(
            f"The WAN emulator did not start within {timeout_s:g} s; is the machine overloaded?"
        )
    line = child.stdout.readline()
    if not line:
        reason = child.stderr.read().strip().splitlines() or ["it ended without a word"]
        raise AparteError(f"The WAN emulator did not start: {reason[-1]}")
    return parse_address(json.loads(line)["listening"])
