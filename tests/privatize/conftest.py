"""Private ends for a tiny model, drawn and not trained: every number in them counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aparte.bridge import teacher as teacher_module
from aparte.bridge.corpus import write_corpus
from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations
from aparte.config import Cut
from aparte.model.parts import Blueprint
from aparte.privatize.ends import Change, PrivateEnds, Veil
from aparte.privatize.file import save_ends
from aparte.privatize.net import EndsNet
from running import FLOAT32

CUT = Cut(2, 2)
KEY = bytes(range(32))
WIDTH = 32


@pytest.fixture(scope="session")
def teacher(llama_folder: Path) -> Teacher:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_module, "training_dtype", lambda device, width: torch.float32)
        return Teacher(llama_folder, CUT, torch.device("cpu"))


@pytest.fixture(scope="session")
def data(teacher: Teacher, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    folder = tmp_path_factory.mktemp("conversations")
    paths = list(write_corpus(teacher, llama_folder, folder, tokens=480, rows=12, length=40, seed=3))
    return Conversations(paths, 4)


def new_net(teacher: Teacher, folder: Path, rank: int = 4) -> EndsNet:
    blueprint = Blueprint.open(folder, FLOAT32)
    prefixes = [blueprint.layer_prefix(index) for index in range(blueprint.layers)]
    return EndsNet(teacher, prefixes, rank, seed=1)


def drawn_veil(generator: torch.Generator, scale: float = 0.5, size: int = 20) -> Veil:
    """``size`` coordinates of ten decoys, with numbers of about ``scale``."""
    axes = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q[:, :size].contiguous()
    table = scale * torch.randn(10, size, generator=generator)
    shares = torch.rand(10, generator=generator)
    spread = 0.3 * scale * torch.randn(size, size, generator=generator)
    return Veil(axes, axes.T.contiguous(), torch.zeros(WIDTH), table, shares / shares.sum(), spread)


NOTHING = drawn_veil(torch.Generator().manual_seed(0), size=0)


def drawn_ends(teacher: Teacher, folder: Path, scale: float = 0.05, mask: float = 0.5) -> PrivateEnds:
    """Changes of ``scale``, and decoys with numbers of about ``mask``."""
    generator = torch.Generator().manual_seed(7)
    changes = {
        name: Change(scale * torch.randn(change.up.shape, generator=generator), change.down)
        for name, change in new_net(teacher, folder).changes().items()
    }
    return PrivateEnds(
        KEY, drawn_veil(generator, mask), changes, {"recipe": {"rank": 4, "steps": 0, "strength": 0.1}}
    )


@pytest.fixture(scope="session")
def ends_file(teacher: Teacher, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ends") / "private.safetensors"
    save_ends(path, drawn_ends(teacher, llama_folder), Blueprint.open(llama_folder, FLOAT32), CUT)
    return path
