"""Training private ends: without it nothing is changed, and a run that stopped goes on as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aparte.bridge.teacher import Teacher
from aparte.bridge.train import Conversations
from aparte.privatize.ends import Veil
from aparte.privatize.shaping import sensitivity, shape_veil
from aparte.privatize.train import Recipe, Report, Trainer
from privatize.conftest import KEY, NOTHING, new_net


def trainer(
    teacher: Teacher, data: Conversations, folder: Path, work: Path, veil: Veil, **recipe: float
) -> Trainer:
    settings = Recipe(rows=4, warmup=2, vocabulary=64, **recipe)  # type: ignore[arg-type]
    net = new_net(teacher, folder, int(recipe.get("rank", 4)))
    return Trainer(teacher, net, veil, data, settings, work, KEY)


@pytest.fixture(scope="module")
def veil(teacher: Teacher, data: Conversations) -> Veil:
    batch = data.batch(range(8))
    read = sensitivity(teacher, [batch], 0, lambda *_: None)
    return shape_veil(teacher, [batch], read, float(read.trace()) / 4)


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
    teacher: Teacher, data: Conversations, llama_folder: Path, tmp_path: Path, veil: Veil, rank: int
) -> None:
    def fresh(name: str) -> Trainer:
        (tmp_path / name).mkdir(exist_ok=True)
        return trainer(teacher, data, llama_folder, tmp_path / name, veil, steps=6, rank=rank)

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


def test_training_lowers_its_loss_and_leads_astray(
    teacher: Teacher, data: Conversations, llama_folder: Path, tmp_path: Path, veil: Veil
) -> None:
    run = trainer(teacher, data, llama_folder, tmp_path, veil, steps=40, learning_rate=5e-3, strength=5.0)
    lines: list[Report] = []
    run.run(lines.append, every=20)
    assert lines[-1].loss < lines[1].loss  # type: ignore[operator]
    assert lines[-1].completed < lines[0].completed


def test_another_secret_draws_other_masks(
    teacher: Teacher, data: Conversations, llama_folder: Path, tmp_path: Path, veil: Veil
) -> None:
    tokens = data.held_out.tokens
    one = trainer(teacher, data, llama_folder, tmp_path, veil, steps=0)
    two = Trainer(teacher, new_net(teacher, llama_folder), veil, data, Recipe(steps=0), tmp_path, bytes(32))
    assert torch.equal(one._values(tokens, 5), one._values(tokens, 5))
    assert not torch.equal(one._values(tokens, 5), one._values(tokens, 6))
    assert not torch.equal(one._values(tokens, 5), two._values(tokens, 5))
