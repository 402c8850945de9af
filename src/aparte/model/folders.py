"""Folders in the cache that are made once, appear complete or not at all, and by one process at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aparte.errors import CheckpointError

#: Called with what is being waited for, how much of it is done and how much there is (0: not known).
Progress = Callable[[str, int, int], None]

#: Written into every folder made here: which model it is, and by which version of the conversion.
MANIFEST = "aparte.json"
#: Raise it when a conversion changes, so that older folders are made anew.
FORMAT = 1
#: A wait for another process is announced when it takes longer than this.
_PATIENCE_S = 1.0


def quiet(label: str, done: int, total: int) -> None:
    """A :data:`Progress` that shows nothing."""


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` is here, whole, and of the current format."""
    return source_of(folder) is not None


def source_of(folder: Path) -> str | None:
    """What ``folder`` was made from, or ``None`` if it was not made by this version of aparte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None
    return str(manifest.get("source"))


def size_of(folder: Path) -> int:
    """Bytes of the files in ``folder``; those that vanish meanwhile do not count."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += (Path(parent) / file).stat().st_size
    return total


@contextmanager
def locked(name: Path, what: str, progress: Progress) -> Iterator[None]:
    """Hold the lock ``name`` against other processes, and tell about the wait if there is one."""
    from filelock import FileLock, Timeout

    name.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(name)
    try:
        lock.acquire(timeout=_PATIENCE_S)
    except Timeout:
        progress(f"Waiting for another process that prepares {what}", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def make(folder: Path, source: str, fill: Callable[[Path], None], progress: Progress = quiet) -> Path:
    """Have ``fill`` write into a fresh folder, then give it the name ``folder``; skipped when it is there."""
    if is_complete(folder):
        return folder
    try:
        with locked(folder.with_name(f".{folder.name}.lock"), folder.name, progress):
            if not is_complete(folder):
                _build(folder, source, fill)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error}. Free some space there, or set "
            "APARTE_CACHE to a folder with room."
        ) from error
    return folder


def _build(folder: Path, source: str, fill: Callable[[Path], None]) -> None:
    # The lock is held, so a folder with this name is what a process left behind that was stopped.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        fill(partial)
        (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "source": source}) + "\n")
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)  # an older format's
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the disk hold what was written to ``path``, so that a power cut leaves no hollow file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
