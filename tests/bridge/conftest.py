"""A tiny teacher, a few conversations that it wrote, and bridges for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aparte.bridge import teacher as teacher_module
from aparte.bridge.corpus import Shard, write_shard
from aparte.bridge.net import BridgeNet
from aparte.bridge.teacher import Teacher
from aparte.config import Cut

CUT = Cut(2, 2)


@pytest.fixture(autouse=True)
def _gradients() -> Iterator[None]:
    """The other tests run without."""
    with torch.enable_grad():
        yield


@pytest.fixture(scope="session")
def teacher(llama_folder: Path) -> Teacher:
    """In float32: bfloat16 is for speed, and equalities are tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_module, "training_dtype", lambda device, width: torch.float32)
        return Teacher(llama_folder, CUT, torch.device("cpu"))


@pytest.fixture(scope="session")
def shard(teacher: Teacher, llama_folder: Path) -> Shard:
    return write_shard(teacher, llama_folder, rows=8, length=48, seed=3)


def new_net(teacher: Teacher, seed: int = 0) -> BridgeNet:
    """Untrained, but not trivial: every weight counts."""
    torch.manual_seed(seed)
    net = BridgeNet(copy.deepcopy(teacher.layers[teacher.middle.stop - 1]), teacher.config.hidden_size)
    net.begin_as_copy()
    with torch.no_grad():
        for parameter in (net.join.weight, net.leave.weight):
            parameter += 0.1 * torch.randn_like(parameter)
    net.requires_grad_(True)
    return net
