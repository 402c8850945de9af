"""What the processes of a command do, read from /proc."""

from __future__ import annotations

from pathlib import Path


def descendants(root: int) -> list[int]:
    """A process, its children and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has just ended
    family, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sorted(family)


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, IPv4 and IPv6; those mapped into IPv6 as IPv4."""
    sockets = set()
    for handle in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            sockets.add(str(handle.readlink()))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:  # LISTEN
                found.append(_readable(words[1].partition(":")[0]))
    return found


def _readable(address: str) -> str:
    """An address as the kernel writes it: in words of four bytes, each little-endian."""
    raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    return ".".join(map(str, raw)) if len(raw) == 4 else raw.hex(":")
