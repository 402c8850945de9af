"""``aparte privatize`` from beginning to end, and the audit of what it made."""

from __future__ import annotations

from pathlib import Path

import pytest

from aparte.model.parts import Blueprint
from aparte.privacy import private_audit
from aparte.privacy import settings as settings_module
from aparte.privacy.settings import Scale
from aparte.privacy.verdict import recall
from aparte.privatize.file import ends_path, load_ends
from aparte.privatize.train import Trainer
from cli.command import Command
from privatize.conftest import CUT
from running import FLOAT32

FEW = ("--tokens", 3000, "--steps", 2, "--rank", 2)
TINY = Scale(
    cuts=("2,2",),
    attacker_tokens=300,
    victims=3,
    length=8,
    conversations=2,
    answer=4,
    seconds=0.5,
    doubtful=1,
    linear_tokens=300,
    price_texts=2,
    thorough=False,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("rank", ["0", "-3", "x", "5000"])
def test_a_rank_that_is_none(aparte: Command, llama_folder: Path, rank: str) -> None:
    result = aparte("privatize", llama_folder, "--rank", rank)
    assert result.code == 2
    assert "must be full" in result.err


def test_it_goes_on_where_it_was_and_is_audited(
    aparte: Command, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("privatize", llama_folder, *FEW)
    path = ends_path(str(llama_folder), CUT)
    work = path.parent / "work" / path.stem
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert aparte(*command).code == 130
    key = (work / "key").read_bytes()
    kept = {file: file.stat().st_mtime_ns for file in work.rglob("*.safetensors")}
    assert {file.name for file in kept} >= {"measured.safetensors", "shard-000.safetensors"}
    assert work.stat().st_mode & 0o777 == 0o700
    assert (work / "key").stat().st_mode & 0o777 == 0o600
    other = aparte(*command, "--seed", 5)
    assert other.code == 2
    assert "other settings" in other.err

    trained = aparte(*command, "--keep", "--json")
    assert trained.code == 0, trained.err
    assert trained.json["private_ends"] == str(path)
    assert [line["step"] for line in trained.json["reports"]] == [0, 2]
    assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    ends = load_ends(path, blueprint, CUT)
    assert ends.key == key
    assert any(change.delta().any() for change in ends.changes.values())
    assert aparte(*command).code == 2  # it would be lost

    # The attacker's own are of another secret, whatever the seed.
    own = tmp_path / "own.safetensors"
    assert aparte(*command, "--out", own).code == 0
    assert not (own.parent / "work").exists() or not list((own.parent / "work").iterdir())
    assert load_ends(own, blueprint, CUT).key != key

    monkeypatch.setattr(settings_module, "QUICK", TINY)
    monkeypatch.setattr(private_audit, "LEAKS", (100, 300))
    audit = ("audit", llama_folder, "--quick", "--dtype", "float32", "--out", tmp_path / "audit", "--json")
    attacks = ("--attacks", "vocabulary,linear,completion,adaptive,leaked")
    defences = ("--defences", f"none,private-ends={path}")
    done = aparte(*audit, *attacks, *defences, "--attacker-ends", own)
    assert done.code == 0, done.err
    rows = [row for row in done.json["attacks"] if row["defence"] != "none"]
    hard = {(row["name"], row["target"], row["leaked"]) for row in rows if "leaked" in row}
    assert hard == {
        *(("adaptive", "prompt", leak) for leak in (0, 100, 300)),
        ("adaptive", "answer", 300),
        *((f"leaked_{name}", "prompt", leak) for name in ("linear", "mlp") for leak in (100, 300)),
    }
    assert all(row["own_copy"] for row in rows if row["name"] == "adaptive")
    assert {row["setting"] for row in done.json["defences"]} == {"none at 2,2", f"private-ends={path}"}
    verdict = recall(blueprint, CUT, ends.setting)
    assert verdict is not None
    assert verdict.prompt == max(row["top1"] for row in rows if row["target"] == "prompt")
    assert "adaptive" in (tmp_path / "audit" / "report.md").read_text(encoding="utf-8")

    for options, sentence in (
        (("--attacker-ends", path), "under audit itself"),
        (("--cuts", "1,1"), "Add it to the cuts"),
    ):
        wrong = aparte(*audit[:-3], "--out", tmp_path / "no", *defences, *options)
        assert wrong.code == 2
        assert sentence in wrong.err
    alone = aparte(*audit[:-3], "--out", tmp_path / "no", "--attacker-ends", own)
    assert alone.code == 2
    assert "of no use" in alone.err
