"""A cloud of our own: ``aparte serve`` as a child process, with the WAN emulator in front if asked."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import IO

from aparte.address import parse_address
from aparte.config import Compute, Cut
from aparte.errors import AparteError, UserError
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process


class CloudProcess:
    """Starts the server at once, so that it loads while the caller does something else.

    Use as a context manager; everything started ends with it. The child only lets in who knows
    :attr:`token`, so other users of this machine are kept out.
    """

    def __init__(
        self, model: str, cut: Cut | None, compute: Compute, profile: WanProfile | None = None
    ) -> None:
        """Without a ``cut`` it serves the whole model, for draft mode."""
        self.token = secrets.token_hex(16)
        self._profile = profile
        self._stack = contextlib.ExitStack()
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._stack.callback(self._errors.close)
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "aparte", "serve", model, "--json", "--port", "0"),
                *(("--whole",) if cut is None else ("--cut", str(cut))),
                *("--dtype", compute.dtype, "--device", compute.device, "--kv", compute.kv),
                *(("--batch-invariant",) if compute.batch_invariant else ()),
                *(("--graphs",) if compute.graphs else ()),
                *("--exit-with-parent", str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "APARTE_TOKEN": self.token},
            text=True,
            start_new_session=True,  # Ctrl-C is for us; the child ends with the context
        )
        self._stack.callback(self._stop)
        self._url: str | None = None

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._child.pid

    def url(self) -> str:
        """Where to connect to; waits until the server is ready. Raises :class:`AparteError` if it fails."""
        if self._url is None:
            assert self._child.stdout is not None
            line = self._child.stdout.readline()
            if not line:
                self._child.wait()
                self._errors.seek(0)
                message = self._errors.read().strip().splitlines()
                kind = UserError if self._child.returncode == 2 else AparteError
                reason = message[-1].removeprefix("Error: ") if message else "it said nothing."
                raise kind(f"The local cloud did not start: {reason}")
            address = json.loads(line)["listening"].removeprefix("ws://")
            if self._profile is not None:
                host, port = self._stack.enter_context(wan_process(parse_address(address), self._profile))
                address = f"{host}:{port}"
            self._url = f"ws://{address}"
        return self._url

    def __enter__(self) -> CloudProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _stop(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
