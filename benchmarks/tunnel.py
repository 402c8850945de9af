"""What an SSH tunnel costs beside the direct port: on loopback, and behind emulated links.

    PYTHONPATH=tests .venv/bin/python benchmarks/tunnel.py          # needs sshd (Debian: openssh-server)
    PYTHONPATH=tests .venv/bin/python benchmarks/tunnel.py --json

The SSH server is a real OpenSSH with a configuration and keys of its own, the model a random one with hidden
states of 1024 numbers. Behind an emulated link, the relay stands before the SSH server for the tunnel, and
before ``aparte serve`` for the direct port. Everything shares this machine's cores.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from aparte.config import Compute, Cut
from aparte.measure.doctor import examine
from aparte.measure.doctor_compare import tunnel_costs, weigh_tunnel
from aparte.measure.doctor_path import Door
from aparte.measure.doctor_sample import take_sample
from aparte.measure.rtt_runs import Device, Reach
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.model.parts import Blueprint
from running import running_server
from ssh_server import SshServer, ssh_server
from tiny import save_tiny

LINKS = (None, WanProfile(rtt_ms=20, mbps=1000), WanProfile(rtt_ms=80, mbps=100), WanProfile(rtt_ms=80))
SHAPE = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "layers": 5,
}  # fmt: skip


def one_link(link: WanProfile | None, device: Device, sshd: SshServer, port: int, key: str) -> dict[str, Any]:
    with ExitStack() as stack:
        ports = [port, sshd.port]
        if link is not None:
            relays = [WanRelay(("127.0.0.1", 0), ("127.0.0.1", to), link) for to in ports]
            ports = [stack.enter_context(relay).port for relay in relays]
        sshd.known_hosts.write_text(f"[127.0.0.1]:{ports[1]} {key}")
        direct = Door(f"ws://127.0.0.1:{ports[0]}")
        tunnel = Door(f"ssh://{getpass.getuser()}@127.0.0.1:{ports[1]}/{port}")
        found = [examine(door, lambda url=door.url: take_sample(device, url)) for door in (direct, tunnel)]
    return {
        "link": str(link or "loopback"),
        "direct": found[0].to_json(),
        "tunnel": found[1].to_json(),
        **tunnel_costs(*found),
        "words": weigh_tunnel(*found, direct),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_grad_enabled(False)
    os.environ.pop("SSH_AUTH_SOCK", None)
    with tempfile.TemporaryDirectory() as name, ssh_server(Path(name) / "ssh") as sshd:
        folder = save_tiny("llama", Path(name) / "model", **SHAPE)
        os.environ["HOME"] = str(sshd.home)
        key = sshd.known_hosts.read_text().split(" ", 1)[1]
        device = Device(Blueprint.open(folder, Compute("float32")), "tiny", Cut(), Reach("float16"))
        with running_server(folder) as (_, url):
            port = int(url.rpartition(":")[2])
            rows = [one_link(link, device, sshd, port, key) for link in LINKS]
    for row in rows:
        print(json.dumps(row) if as_json else f"{row['link']}: {row['words']}\n")


if __name__ == "__main__":
    main()
