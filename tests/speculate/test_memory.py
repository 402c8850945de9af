"""What --remember keeps: on this device, for this user, until it is erased."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from aparte.errors import UserError
from aparte.speculate.accept import accept
from aparte.speculate.drafter import Outcome
from aparte.speculate.memory import Memory, erase, memory_dir
from aparte.speculate.recycling import Recycling
from aparte.speculate.tree import DraftTree
from cli.command import Command

VOCAB = 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))


def learned() -> Recycling:
    recycling, tree = Recycling(), DraftTree((20, 21), (-1, 0), (0.5, 0.4))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    choices = tuple(logits.argmax(-1).tolist())
    recycling.learn([5, 6], Outcome(tree, choices, accept(tree, choices), logits))
    return recycling


def test_what_was_learned_comes_back() -> None:
    memory, table = Memory("some/model", VOCAB), learned()
    memory.save(table)
    again = memory.load()
    for place in ([5, 6], [6, 20], [20, 21], [1, 20]):
        before = table.candidates(table.start(place))
        after = again.candidates(again.start(place))
        assert [candidate.token for candidate in after] == [candidate.token for candidate in before]
        for one, other in zip(after, before, strict=True):
            assert one.prior == pytest.approx(other.prior, rel=1e-3)


def test_only_the_user_may_read_it() -> None:
    memory = Memory("model", VOCAB)
    memory.save(learned())
    assert stat.S_IMODE(memory.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(memory.path.parent.stat().st_mode) == 0o700
    assert [path.name for path in memory_dir().iterdir()] == [memory.path.name]


def test_erasing_leaves_nothing() -> None:
    for name in ("one", "two"):
        Memory(name, VOCAB).save(learned())
    assert erase() == 2
    assert list(memory_dir().iterdir()) == []
    assert len(Memory("one", VOCAB).load()) == 0
    assert erase() == 0


@pytest.mark.parametrize("damage", ["missing", "cut", "vocabulary", "shape", "share", "dtype"])
def test_a_file_that_is_not_usable_is_as_good_as_none(damage: str) -> None:
    memory = Memory("model", VOCAB)
    memory.save(learned())
    assert len(memory.load()) > 0
    arrays = load_file(memory.path)
    if damage == "missing":
        memory.path.unlink()
    elif damage == "cut":
        memory.path.write_bytes(memory.path.read_bytes()[:40])
    else:
        if damage == "vocabulary":
            arrays["one_tokens"][0, 0] = VOCAB
        elif damage == "shape":
            arrays["two_keys"] = arrays["two_keys"][:, :1].copy()
        elif damage == "share":
            arrays["one_shares"][0, 0] = np.float16("nan")
        else:
            arrays["one_keys"] = arrays["one_keys"].astype(np.float32) + np.float32(0.5)
        save_file(arrays, memory.path)
    assert len(memory.load()) == 0


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(UserError, match="leave --remember out"):
        Memory("model", VOCAB).save(learned())


def test_the_command_line_remembers_and_forgets(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat", "--max-new-tokens", 30, "--max-nodes", 16)
    exact = ("--dtype", "float32", "--wire", "float32", "--json")
    plain = aparte(*base, *exact)
    assert not memory_dir().exists()
    first = aparte(*base, *exact, "--remember")
    second = aparte(*base, *exact, "--remember")
    assert plain.json["token_ids"] == first.json["token_ids"] == second.json["token_ids"]
    assert second.json["round_trips"] < first.json["round_trips"]
    assert aparte("forget", "--json").json["erased"] == 1
    assert aparte(*base, *exact, "--remember").json["round_trips"] == first.json["round_trips"]
    assert aparte("forget").out.startswith("Erased 1 table in")


def test_a_full_disk_costs_no_answer(aparte: Command, llama_folder: Path) -> None:
    memory_dir().parent.mkdir()
    memory_dir().write_text("in the way")
    result = aparte("generate", llama_folder, "the cat", "--max-new-tokens", 5, "--remember", "--json")
    assert result.code == 0
    assert result.json["new_tokens"] == 5
    assert "leave --remember out" in result.err


def test_there_has_to_be_a_table(aparte: Command, llama_folder: Path) -> None:
    result = aparte("generate", llama_folder, "the cat", "--decode", "lookahead", "--remember")
    assert result.code == 2
    assert "Use auto" in result.err
