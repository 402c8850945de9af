"""A real OpenSSH server on loopback: its own configuration, host key, port and account's keys."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
_START_S = 20


@dataclass
class SshServer:
    """A running server, and a home folder whose keys it accepts."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def url(self, port: int) -> str:
        """The address of a server on this machine's ``port``, by way of this one."""
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}/{port}"

    def connections(self) -> list[int]:
        """The processes that serve a connection each."""
        assert self.process is not None
        return _children(self.process.pid)

    def kill_connections(self) -> int:
        """End every connection without a word; how many there were."""
        found = self.connections()
        for child in found:
            for process in (*_children(child), child):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        return len(found)

    def start(self) -> None:
        assert SSHD is not None
        self.process = subprocess.Popen(
            [SSHD, "-D", "-E", str(self.folder / "log"), "-f", str(self.folder / "sshd_config")]
        )
        ends = time.monotonic() + _START_S
        while time.monotonic() < ends and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError(self.log)

    def stop(self) -> None:
        if self.process is not None:
            self.kill_connections()
            self.process.terminate()
            self.process.wait(_START_S)
            self.process = None


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def ssh_server(folder: Path, *settings: str) -> Iterator[SshServer]:
    """Run one with further lines of configuration; skips where there is no ``sshd``."""
    import asyncssh

    if SSHD is None:
        pytest.skip("sshd is not installed (Debian: openssh-server)")
    if os.geteuid() == 0:  # where it drops its privileges
        with contextlib.suppress(OSError):
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = SshServer(port, folder)
    (server.home / ".ssh").mkdir(parents=True, mode=0o700)
    host_key, key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    for name, content in (
        ("host_key", host_key.export_private_key("openssh")),
        ("home/.ssh/id_ed25519", key.export_private_key("openssh")),
        ("authorized_keys", key.export_public_key("openssh")),
        ("home/.ssh/known_hosts", f"[127.0.0.1]:{port} ".encode() + host_key.export_public_key("openssh")),
    ):
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(content)
    lines = (
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder / 'host_key'}",
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        f"PidFile {folder / 'pid'}",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes no",
        "MaxStartups 100",
        *settings,
    )
    (folder / "sshd_config").write_text(
        "\n".join(sorted(lines, key=lambda line: line not in settings)) + "\n"
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
