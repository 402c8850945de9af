"""Layers that two processes share compute what one process computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aparte.cloud import ranks
from aparte.cloud.ranks import meet
from aparte.config import Compute
from aparte.errors import UserError
from aparte.model.linear import packed_available
from aparte.model.parts import Blueprint
from aparte.model.tensor_parallel import Split, Summed
from aparte.step import ROOT, Step
from model import rank
from tiny import VARIANTS, tiny_model

WIDTH = 32
#: Prefill, a tree, a step below one of its branches, a rollback into the prompt, and on from there.
STEPS = [
    Step(1, 0, ROOT, 0, (ROOT, 0, 1, 2, 3, 4, 5, 6, 7, 8)),
    Step(2, 0, 9, 10, (9, 10, 10, 11, 9, 14)),
    Step(3, 0, 12, 16, (12, 16, 16)),
    Step(4, 1, 4, 5, (4, 5, 4)),
    Step(5, 1, 6, 8, (6,)),
]
#: Families whose plan leaves a norm over all heads whole while it splits the heads: theirs to mend.
UNFIT = ("cohere",)
SUBJECTS = [(name, "float32") for name in VARIANTS if name not in UNFIT] + [
    (name, "packed16") for name in ("llama", "qwen3") if packed_available()
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("split")
    for name in VARIANTS:
        tiny_model(name, layers=3).save_pretrained(root / name)
    return {name: root / name for name in VARIANTS}


@pytest.fixture(scope="module")
def outputs(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], list[torch.Tensor]]]:
    """What this process makes of all models together with another one, over gloo."""
    place = tmp_path_factory.mktemp("meet")
    plan = {
        "models": [(str(folders[name]), dtype) for name, dtype in SUBJECTS],
        "steps": [(step.number, step.epoch, step.commit, step.base, step.parents) for step in STEPS],
        "width": WIDTH,
    }
    (place / "plan").write_text(json.dumps(plan))
    other = subprocess.Popen(
        [sys.executable, "-m", "model.rank", str(place / "meet"), str(place / "plan")],
        cwd=Path(__file__).parents[1],
    )
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=200))  # if the other one failed
    try:
        meet(0, rank.SIZE, str(place / "meet"), torch.device("cpu"))
        yield {
            (name, dtype): rank.passes(rank.share_of(folders[name], 0, dtype), STEPS, WIDTH)
            for name, dtype in SUBJECTS
        }
        assert other.wait(30) == 0
    finally:
        monkeypatch.undo()
        other.kill()
        other.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(("name", "dtype"), SUBJECTS)
def test_two_processes_compute_what_one_does(
    folders: dict[str, Path], outputs: dict[tuple[str, str], list[torch.Tensor]], name: str, dtype: str
) -> None:
    blueprint = Blueprint.open(folders[name], Compute(dtype, "cpu"))  # type: ignore[arg-type]
    expected = rank.passes(blueprint.stage(range(blueprint.layers)), STEPS, WIDTH)
    scale = float(torch.cat(expected).abs().max())
    for ours, theirs in zip(outputs[name, dtype], expected, strict=True):
        # Half-precision weights are the same numbers in both; what differs is the order of sums.
        assert float((ours - theirs).abs().max()) < 1e-4 * max(1.0, scale)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in UNFIT])
def test_each_process_holds_its_share_and_no_more(folders: dict[str, Path], name: str) -> None:
    whole = Blueprint.open(folders[name], Compute("float32", "cpu"))
    sizes = []
    for number in range(2):
        split = Split(number, 2)
        layer = whole.empty_layer(0)
        split.shrink(layer, split.plan(whole))
        sizes.append(sum(weight.numel() for weight in layer.parameters() if weight.ndim > 1))
    matrices = sum(weight.numel() for weight in whole.empty_layer(0).parameters() if weight.ndim > 1)
    assert sizes[0] == sizes[1]
    # Routers of experts are whole in both.
    assert matrices // 2 <= sizes[0] < 0.6 * matrices


@pytest.mark.parametrize(
    ("settings", "size", "sentence"),
    [
        ({}, 3, r"it has 4 attention heads, and 4 is not divisible by 3"),
        ({}, 4, r"it has 2 heads of keys and values, and 2 is not divisible by 4"),
        ({"intermediate_size": 61}, 2, r"mlp.gate_proj.weight is 61 wide, and 61 is not divisible by 2"),
    ],
)
def test_what_cannot_be_divided_is_a_sentence_with_its_numbers(
    tmp_path: Path, settings: dict[str, int], size: int, sentence: str
) -> None:
    tiny_model("llama", layers=2, **settings).save_pretrained(tmp_path)
    blueprint = Blueprint.open(tmp_path, Compute("float32", "cpu"))
    with pytest.raises(UserError, match=sentence):
        Split(0, size).check(blueprint)


def test_a_family_without_a_plan_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blueprint = Blueprint.open(folders["llama"], Compute("float32", "cpu"))
    for plan, sentence in ((None, "do not say how"), ({"layers.*.mlp": "sideways"}, "style 'sideways'")):
        monkeypatch.setattr(type(blueprint.config), "base_model_tp_plan", plan)
        with pytest.raises(UserError, match=sentence):
            Split(0, 2).check(blueprint)


@pytest.mark.parametrize("name", UNFIT)
def test_a_plan_that_leaves_something_of_the_heads_whole_is_refused(
    folders: dict[str, Path], name: str
) -> None:
    with pytest.raises(UserError, match=r"q_norm.weight has values for each head"):
        Split(0, 2).check(Blueprint.open(folders[name], Compute("float32", "cpu")))


def test_a_bias_is_added_once(folders: dict[str, Path]) -> None:
    blueprint = Blueprint.open(folders["gpt-neox"], Compute("float32", "cpu"))
    bias = torch.ones(4)
    shares = [
        Split(number, 2).share("attention.dense.bias", bias, Split(number, 2).plan(blueprint))
        for number in range(2)
    ]
    assert torch.equal(shares[0] + shares[1], bias)


def test_only_rowwise_modules_wait_for_the_others(folders: dict[str, Path]) -> None:
    blueprint = Blueprint.open(folders["llama"], Compute("float32", "cpu"))
    layer, split = blueprint.empty_layer(0), Split(0, 2)
    split.join(layer, split.plan(blueprint))
    waiting = [name for name, module in layer.named_modules() if isinstance(module, Summed)]
    assert waiting == ["self_attn.o_proj", "mlp.down_proj"]
