"""Where and from what a number comes: machine, version and commit, for reports."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from aparte import __version__

_HERE = Path(__file__).parent


def machine() -> str:
    """Cores, processor and Python; nothing that names the machine itself."""
    return f"{os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}"


def load() -> float | None:
    """Programs that wanted a processor in the last minute; None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 1)
    except (AttributeError, OSError):
        return None


def commit() -> str:
    """The commit of the source that runs, with + if it was changed since; the version where there is none."""
    head = _git("rev-parse", "--short", "HEAD")
    # An installed copy inside somebody else's repository has that one's commits, not ours.
    if head is None or _git("ls-files", "--error-unmatch", str(Path(__file__))) is None:
        return f"version {__version__}"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", str(_HERE.parent))
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=_HERE, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _processor() -> str:
    """The processor's name where the system tells it, because speeds depend on little else.

    And whether it multiplies tiles: under one name there are those that do and those that don't.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", "unknown")
    if name == "unknown":
        name = platform.machine()
    return f"{name} with AMX" if "amx_tile" in fields.get("flags", "").split() else name
