"""A cloud as a process, for the measurements that try to break it: starting, killing, and looking at it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any


class Cloud:
    """``aparte serve`` as a process, always on the same port."""

    def __init__(self, model: str, dtype: str, *more: str) -> None:
        """``more`` are further arguments of ``aparte serve``."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._command = [
            *(sys.executable, "-m", "aparte", "serve", model, "--port", str(self.port), "--json"),
            *("--dtype", dtype, "--exit-with-parent", str(os.getpid()), "--log-format", "json", *more),
        ]
        #: Everything that it logged.
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def start(self) -> None:
        self._child = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def wait_until_ready(self) -> None:
        assert self._child.stdout is not None
        if not self._child.stdout.readline():
            sys.exit("A cloud did not start. Try the same `aparte serve` command by hand.")

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def logged(self) -> list[dict[str, Any]]:
        """The events of its log."""
        self.log.seek(0)
        return [json.loads(line) for line in self.log if line.startswith("{")]


def resident_bytes(pid: int) -> int:
    """Memory of a process, on Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)
