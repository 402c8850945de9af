"""Training private ends: what nothing was learned of changes nothing; a run that was cut off ends the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations
from aparte.privatize.shaping import MaskShape, covariance, sensitivity, shape_mask
from aparte.privatize.train import Recipe, Report, Trainer
from privatize.conftest import KEY, WIDTH, new_net

NOTHING = MaskShape(torch.zeros(WIDTH, WIDTH), 0.0, 0.0, 0.0)


def trainer(
    teacher: Teacher, data: Conversations, folder: Path, work: Path, shape: MaskShape, **recipe: float
) -> Trainer:
    settings = Recipe(rows=4, warmup=2, vocabulary=64, **recipe)  # type: ignore[arg-type]
    net = new_net(teacher, folder, int(recipe.get("rank", 4)))
    return Trainer(teacher, net, shape, data, settings, work, KEY)


@pytest.fixture(scope="module")
def shape(teacher: Teacher, data: Conversations) -> MaskShape:
    batch = data.batch(range(8))
    read = sensitivity(teacher, [batch], 0, lambda *_: None)
    return shape_mask(read, covariance(batch.front), 0.05)


def test_without_mask_and_training_nothing_is_changed(
    teacher: Teacher, data: Conversations, llama_folder: Path, tmp_path: Path
) -> None:
    idle = trainer(teacher, data, llama_folder, tmp_path, NOTHING, steps=0)
    report = idle.measure(None, 0.0)
    assert report.divergence == pytest.approx(0, abs=1e-4)  # the conversations' states are rounded
    assert report.perplexity_ratio == pytest.approx(1, abs=1e-3)
    assert report.agreement > 0.98
    assert report.recovered_public == pytest.approx(report.recovered_pairs, abs=0.02)
    assert not any(change.delta().any() for change in idle.net.changes().values())


@pytest.mark.parametrize("rank", [4, 0])
def test_an_interrupted_run_ends_the_same_to_the_bit(
    teacher: Teacher, data: Conversations, llama_folder: Path, tmp_path: Path, shape: MaskShape, rank: int
) -> None:
    def fresh(name: str) -> Trainer:
        (tmp_path / name).mkdir(exist_ok=True)
        return trainer(teacher, data, llama_folder, tmp_path / name, shape, steps=6, rank=rank)

    fresh("whole").run(lambda _: None, every=3)

    def stop(line: Report) -> None:
        if line.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fresh("parts").run(stop, every=3)
    lines: list[Report] = []
    fresh("parts").run(lines.append, every=3)
    assert [line.step for line in lines] == [6]
    one, two = (load_file(tmp_path / name / "training.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "parts" / "training.safetensors").stat().st_mode & 0o777 == 0o600


def test_training_lowers_its_loss_and_what_is_told(
    teacher: Teacher, data: Conversations, llama_folder: Path, tmp_path: Path, shape: MaskShape
) -> None:
    run = trainer(
        teacher, data, llama_folder, tmp_path, shape, steps=40, learning_rate=5e-3, information=50.0
    )
    lines: list[Report] = []
    run.run(lines.append, every=20)
    first, last = lines[0], lines[-1]
    assert lines[-1].loss < lines[1].loss  # type: ignore[operator]
    assert last.bits < first.bits  # type: ignore[operator]


def test_another_secret_draws_other_masks(
    teacher: Teacher, data: Conversations, llama_folder: Path, tmp_path: Path, shape: MaskShape
) -> None:
    tokens = data.held_out.tokens
    one = trainer(teacher, data, llama_folder, tmp_path, shape, steps=0)
    two = Trainer(teacher, new_net(teacher, llama_folder), shape, data, Recipe(steps=0), tmp_path, bytes(32))
    assert torch.equal(one._mask(tokens, 5), one._mask(tokens, 5))
    assert not torch.equal(one._mask(tokens, 5), one._mask(tokens, 6))
    assert not torch.equal(one._mask(tokens, 5), two._mask(tokens, 5))
