"""A server whose forward passes wait until a test lets them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from aparte.cloud.server import MiddleServer
from aparte.model.cache import SlotCache
from aparte.model.stage import Stage
from aparte.step import Step


class GatedStage(Stage):
    """A stage whose forward pass can be held up."""

    def __init__(self, stage: Stage) -> None:
        self.__dict__ = {**stage.__dict__, "gate": threading.Event(), "entered": threading.Event()}
        self.gate: threading.Event
        self.entered: threading.Event

    def forward(self, cache: SlotCache, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.gate.wait(20)
        return super().forward(cache, step, hidden)


@contextlib.contextmanager
def held_up(server: MiddleServer) -> Iterator[GatedStage]:
    """No forward pass ends until the stage's ``gate`` is set, or this block is left."""
    stage = server.engine._stage
    gated = GatedStage(stage)
    server.engine._stage = gated
    try:
        yield gated
    finally:
        gated.gate.set()
        server.engine._stage = stage
