"""Tunnels through a real OpenSSH server: the same text, whatever becomes of them, and every refusal."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncssh
import pytest

from aparte.api import Aparte
from aparte.cloud.door import tls_context
from aparte.config import ServerLimits
from aparte.errors import AparteError, DoorError, LinkError, UserError
from aparte.measure.doctor import examine
from aparte.measure.doctor_path import Door
from aparte.wire import tunnel as tunnels
from aparte.wire.ssh_address import Account, SshAddress
from aparte.wire.tunnel import Tunnel, tunnel_to
from certificates import make_certificate
from cli.command import start
from dialogue import wait_until
from running import running_server
from ssh_server import SshServer, ssh_server

PROMPT = "Why is the sky blue? " * 4
TOKENS = 40
SETTINGS = {"dtype": "float32", "decode": "sequential", "sessions": 1}


def local_port(url: str) -> int:
    return urlsplit(url).port or 0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server(tmp_path_factory.mktemp("ssh")) as server:
        yield server


@pytest.fixture
def sshd(running: SshServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    """The server, with a home folder that it accepts; whatever the tests do there is undone."""
    at_home(running, monkeypatch)
    kept = running.known_hosts.read_bytes()
    yield running
    for tunnel in tunnels._tunnels.values():
        tunnel.close()
    wait_until(lambda: not running.connections())
    running.known_hosts.write_bytes(kept)
    (running.home / ".ssh" / "config").unlink(missing_ok=True)


def at_home(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(tunnels, "_tunnels", {})  # every test connects anew


@pytest.fixture(scope="module")
def cloud(llama_folder: Path) -> Iterator[int]:
    with running_server(llama_folder, limits=ServerLimits(grace_s=30)) as (_, url):
        yield local_port(url)


@pytest.fixture(scope="module")
def truth(llama_folder: Path) -> list[int]:
    with Aparte.connect(str(llama_folder), target="local", dtype="float32", decode="sequential") as model:
        return model.generate(PROMPT, max_new_tokens=TOKENS).token_ids


def dial(server: SshServer, port: int) -> socket.socket:
    address = SshAddress.parse(server.url(port))
    return tunnel_to(address.account).dial(address.to, 10)


class TestText:
    def test_it_is_the_same_through_a_tunnel(
        self, sshd: SshServer, cloud: int, llama_folder: Path, truth: list[int]
    ) -> None:
        told: list[str] = []
        with Aparte.connect(
            str(llama_folder), cloud=sshd.url(cloud), notice=told.append, **SETTINGS
        ) as model:
            answer = model.generate(PROMPT, max_new_tokens=TOKENS)
        assert answer.token_ids == truth
        assert answer.reconnects == 0
        assert told == [], "SSH encrypts, so there is nothing to warn of"

    def test_killed_connections_cost_time_and_no_token(
        self, sshd: SshServer, cloud: int, llama_folder: Path, truth: list[int]
    ) -> None:
        with Aparte.connect(str(llama_folder), cloud=sshd.url(cloud), **SETTINGS) as model:
            killed = 0
            with model.stream(PROMPT, max_new_tokens=TOKENS) as stream:
                for number, _ in enumerate(stream):
                    if number in (3, 4, 20):
                        killed += sshd.kill_connections()
        assert killed >= 3
        assert stream.answer.token_ids == truth
        assert stream.answer.reconnects >= 3

    def test_an_ssh_server_that_is_away_for_a_while(
        self, sshd: SshServer, cloud: int, llama_folder: Path, truth: list[int]
    ) -> None:
        with Aparte.connect(str(llama_folder), cloud=sshd.url(cloud), **SETTINGS) as model:
            with model.stream(PROMPT, max_new_tokens=TOKENS) as stream:
                for number, _ in enumerate(stream):
                    if number == 5:
                        sshd.stop()
                        back = threading.Timer(0.3, sshd.start)
                        back.start()
            back.join()
        assert stream.answer.token_ids == truth
        assert stream.answer.reconnects >= 1

    def test_several_sessions_share_one_ssh_connection(
        self, sshd: SshServer, cloud: int, llama_folder: Path, truth: list[int]
    ) -> None:
        with Aparte.connect(
            str(llama_folder), cloud=sshd.url(cloud), **(SETTINGS | {"sessions": 3})
        ) as model:

            async def all_at_once() -> list[list[int]]:
                answers = [model.agenerate(PROMPT, max_new_tokens=TOKENS) for _ in range(3)]
                return [answer.token_ids for answer in await asyncio.gather(*answers)]

            assert asyncio.run(all_at_once()) == [truth] * 3
            assert len(sshd.connections()) == 1

    def test_tls_inside(self, sshd: SshServer, llama_folder: Path, tmp_path: Path) -> None:
        """For a server that also listens on a public port, with a certificate for the SSH server's name."""
        cert, key = make_certificate(tmp_path)
        with running_server(llama_folder, tls=tls_context(cert, key), token="t") as (_, url):
            way = sshd.url(local_port(url))
            assert examine(Door(way, "t", cert)).failure is None
            assert examine(Door(way, "t")).failure is not None

    @pytest.mark.slow
    def test_it_ends_with_the_program(self, sshd: SshServer, cloud: int, llama_folder: Path) -> None:
        with start(
            "generate", llama_folder, PROMPT, "--cloud", sshd.url(cloud), "--max-new-tokens", 400, "--rtt", 0
        ) as refused:
            _, said = refused.communicate(timeout=120)
        assert refused.returncode == 2
        assert "SSH goes its own way" in said
        with start("generate", llama_folder, PROMPT, "--cloud", sshd.url(cloud), "--json") as child:
            out, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        assert '"reconnects": 0' in out
        wait_until(lambda: not sshd.connections())


class TestRefusals:
    def test_an_unknown_host_key(self, sshd: SshServer) -> None:
        sshd.known_hosts.write_text("")
        before = len(sshd.log)
        with pytest.raises(
            DoorError, match=r"is not known yet \(ssh-ed25519, SHA256:.*connect once with `ssh"
        ):
            dial(sshd, 1)
        assert "Accepted" not in sshd.log[before:]

    def test_no_known_hosts_at_all(self, sshd: SshServer) -> None:
        sshd.known_hosts.unlink()
        with pytest.raises(DoorError, match="is not known yet"):
            dial(sshd, 1)

    def test_a_configuration_that_would_trust_everybody(self, sshd: SshServer, cloud: int) -> None:
        config = sshd.home / ".ssh" / "config"
        for lines in (
            "UserKnownHostsFile none",
            "UserKnownHostsFile /nowhere/at/all",
            "StrictHostKeyChecking no",
        ):
            config.write_text(f"Host *\n  {lines}\n")
            if "Strict" in lines:
                sshd.known_hosts.write_text("")
            with pytest.raises(DoorError, match="is not known yet"):
                dial(sshd, cloud)

    def test_another_host_key(self, sshd: SshServer) -> None:
        other = asyncssh.generate_private_key("ssh-ed25519").export_public_key("openssh").decode()
        sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {other}")
        with pytest.raises(DoorError, match=rf"another SSH key.*ssh-keygen -R '\[127.0.0.1\]:{sshd.port}'"):
            dial(sshd, 1)

    def test_another_kind_of_host_key(self, sshd: SshServer) -> None:
        other = asyncssh.generate_private_key("ecdsa-sha2-nistp256").export_public_key("openssh").decode()
        sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {other}")
        with pytest.raises(DoorError, match=r"another SSH key than the known one \(ssh-ed25519"):
            dial(sshd, 1)

    def test_a_key_that_is_not_accepted(self, sshd: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
        key = sshd.home / ".ssh" / "id_ed25519"
        kept = key.read_bytes()
        try:
            key.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh"))
            with pytest.raises(DoorError, match=r"accepts none of your SSH keys.*ssh-add"):
                dial(sshd, 1)
            key.unlink()
            with pytest.raises(DoorError, match="accepts none of your SSH keys"):
                dial(sshd, 1)
        finally:
            key.write_bytes(kept)

    def test_nothing_listens_there(self, sshd: SshServer) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(
            LinkError, match=rf"SSH reaches 127.0.0.1, and nothing listens there on .*:{port}"
        ):
            dial(sshd, port)

    def test_a_server_that_allows_no_tunnels(
        self, tmp_path: Path, cloud: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ssh_server(tmp_path / "strict", "AllowTcpForwarding no") as strict:
            at_home(strict, monkeypatch)
            with pytest.raises(DoorError, match="does not allow a tunnel to"):
                dial(strict, cloud)

    def test_nobody_there(self, sshd: SshServer) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(LinkError, match="came about"):
            Tunnel(Account("127.0.0.1", port=port)).dial(("127.0.0.1", 1), 10)

    def test_somebody_who_says_nothing(self, sshd: SshServer) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            tunnel = Tunnel(Account("127.0.0.1", port=silent.getsockname()[1]))
            with pytest.raises(LinkError, match=r"did not come about within 0\.3 s"):
                tunnel.dial(("127.0.0.1", 1), 0.3)

    def test_no_ssh_server(self, sshd: SshServer, cloud: int) -> None:
        with pytest.raises(AparteError, match=r"127\.0\.0\.1"):
            Tunnel(Account("127.0.0.1", port=cloud)).dial(("127.0.0.1", 1), 10)

    def test_a_broken_configuration(self, sshd: SshServer) -> None:
        (sshd.home / ".ssh" / "config").write_text("Host *\n  Port many\n")
        with pytest.raises(UserError, match="SSH configuration cannot be used"):
            dial(sshd, 1)
        (sshd.home / ".ssh" / "config").unlink()
        sshd.known_hosts.write_text("alone\n")
        with pytest.raises(UserError, match="SSH cannot use what it was given"):
            dial(sshd, 1)


class TestConfiguration:
    def test_known_hosts_of_the_users_own(self, sshd: SshServer, cloud: int, tmp_path: Path) -> None:
        sshd.known_hosts.rename(tmp_path / "elsewhere")
        (sshd.home / ".ssh" / "config").write_text(f"UserKnownHostsFile /nowhere {tmp_path / 'elsewhere'}\n")
        dial(sshd, cloud).close()

    def test_an_alias_of_the_users_own(self, sshd: SshServer, cloud: int) -> None:
        (sshd.home / ".ssh" / "config").write_text(
            f"Host MyGpu\n  HostName 127.0.0.1\n  Port {sshd.port}\n  HostKeyAlias [127.0.0.1]:{sshd.port}\n"
        )
        assert examine(Door(f"ssh://MyGpu/{cloud}")).failure is None

    def test_nothing_listens_on_this_machine(self, sshd: SshServer, cloud: int) -> None:
        """Other users of this machine cannot come in: there is no port and no socket with a name."""
        before = listening()
        with dial(sshd, cloud):
            assert listening() == before

    def test_a_connection_that_nobody_uses_ends(
        self, sshd: SshServer, cloud: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tunnels, "IDLE_S", 0.05)
        with dial(sshd, cloud):
            assert len(sshd.connections()) == 1
        wait_until(lambda: not sshd.connections())
        dial(sshd, cloud).close()  # and another one begins

    def test_one_tunnel_for_one_account(self) -> None:
        assert tunnel_to(Account("h", "me")) is tunnel_to(Account("h", "me"))
        assert tunnel_to(Account("h", "me")) is not tunnel_to(Account("h", "you"))


def listening() -> set[str]:
    """The sockets of this process that others could connect to."""
    ours = {
        str(link.readlink()).removeprefix("socket:[").removesuffix("]")
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()  # not the one that lists them, which is gone
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in ours:
                found.add(words[1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "00010000" and words[6] in ours:
            found.add(line)
    return found
