"""Fixtures that many tests share: tiny models of every family, and the embedded default model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aparte.cloud import journal
from aparte.config import DEFAULT_MODEL
from aparte.errors import AparteError
from cli.command import Command
from tiny import FAMILIES, save_tiny

# Tiny models lose more to thread hand-overs than they gain, above all on a busy machine; child
# processes inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
torch.set_grad_enabled(False)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a tiny random model and its tokenizer, by family."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(family, root / family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny_folder(tiny_folders: dict[str, Path], family: str) -> Path:
    return tiny_folders[family]


@pytest.fixture(scope="session")
def llama_folder(tiny_folders: dict[str, Path]) -> Path:
    return tiny_folders["llama"]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The embedded default model's folder; skips where it can neither be found nor fetched."""
    from aparte.model.registry import resolve

    try:
        return resolve(DEFAULT_MODEL)
    except AparteError as error:
        pytest.skip(f"the default model is not available: {error}")


@pytest.fixture
def all_cores() -> Iterator[None]:
    """For the few tests that compute enough to gain from them."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def aparte(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("APARTE_TOKEN", raising=False)
    monkeypatch.delenv("APARTE_DEBUG", raising=False)
    return Command(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command that runs in this process sets up the log for a process of its own; it ends with the test."""
    root = logging.getLogger()
    level = root.level
    yield
    ours = (journal.TextLines, journal.JsonLines)
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler.formatter, ours)]
    root.setLevel(level)
