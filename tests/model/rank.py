"""The second of two processes that share layers: does the passes that the test in the first one does too.

Arguments: the file where they meet, and one with the plan: folders, and steps for all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from aparte.cloud.ranks import meet
from aparte.config import Compute
from aparte.model.parts import Blueprint
from aparte.model.stage import Item, Stage
from aparte.model.tensor_parallel import Split
from aparte.step import Step

SIZE = 2


def share_of(folder: Path, rank: int, dtype: str) -> Stage:
    """That process's share of all layers of a model."""
    blueprint = Blueprint.open(folder, Compute(dtype, "cpu"))  # type: ignore[arg-type]
    blueprint.split = Split(rank, SIZE)
    return blueprint.stage(range(blueprint.layers))


def passes(stage: Stage, steps: list[Step], width: int) -> list[torch.Tensor]:
    """What comes of the steps, ``[n, D]`` each, and in the end of two sessions that share passes."""
    cache, outputs = stage.new_cache(), []
    for step in steps:
        outputs.append(stage.forward(cache, step, states(step, width)))
    caches = [stage.new_cache(), stage.new_cache()]
    for step in steps[:2] if stage.shares_passes else ():
        for output in stage.forward_many([Item(each, step, states(step, width)) for each in caches]):
            assert not isinstance(output, Exception)
            outputs.append(output.hidden)
    return outputs


def states(step: Step, width: int) -> torch.Tensor:
    """Made-up hidden states ``[n, D]``, the same in every process."""
    generator = torch.Generator().manual_seed(step.number)
    return torch.randn(len(step), width, generator=generator)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    plan = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    meet(1, SIZE, sys.argv[1], torch.device("cpu"))
    for folder, dtype in plan["models"]:
        steps = [Step(*numbers, tuple(parents)) for *numbers, parents in plan["steps"]]
        passes(share_of(Path(folder), 1, dtype), steps, plan["width"])


if __name__ == "__main__":
    main()
