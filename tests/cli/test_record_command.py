"""``--record``, ``aparte record show`` and ``aparte audit --recorded``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte import Aparte
from aparte.config import Cut
from aparte.errors import UserError
from aparte.wire.record import read_recording
from cli.command import Command
from running import running_server

PROMPT = "The ship leaves the harbour on Monday."


@pytest.fixture
def recording(aparte: Command, llama_folder: Path, tmp_path: Path) -> Path:
    file = tmp_path / "seen"
    result = aparte(
        *("generate", llama_folder, PROMPT, "--raw", "--max-new-tokens", 4, "--record", file),
        *("--dtype", "float32", "--wire", "float32"),
    )
    assert result.code == 0, result.err
    return file


def test_what_was_recorded_is_shown_without_content(aparte: Command, recording: Path) -> None:
    shown = aparte("record", "show", recording, "--steps", 2)
    assert shown.code == 0, shown.err
    assert "session 1:" in shown.out
    assert "more steps" in shown.err
    found = aparte("record", "show", recording, "--json").json
    assert found["sessions"][0]["steps"][0]["norm_up"] > 0
    assert "harbour" not in shown.out + json.dumps(found)


def test_it_is_audited(aparte: Command, recording: Path, llama_folder: Path, tmp_path: Path) -> None:
    command = (
        "audit",
        llama_folder,
        "--recorded",
        recording,
        "--out",
        tmp_path / "out",
        "--dtype",
        "float32",
    )
    told = aparte(*command, "--reveal")
    assert told.code == 0, told.err
    assert "vocabulary matching found" in told.err
    assert "Session 1: The ship" in told.out
    found = aparte(*command, "--json").json
    assert found["recorded"] == "seen"
    assert found["sessions"][0]["found_share"] > 0.9
    assert json.loads((tmp_path / "out" / "recorded.json").read_text(encoding="utf-8")) == found
    assert "ship" not in json.dumps(found)


def test_mistakes(aparte: Command, recording: Path, llama_folder: Path, tmp_path: Path) -> None:
    generate = ("generate", llama_folder, PROMPT, "--max-new-tokens", 2)
    assert "never replaces" in aparte(*generate, "--record", recording).err
    assert "--target local has none" in aparte(*generate, "--target", "local", "--record", tmp_path / "x").err
    assert not (tmp_path / "x").exists()
    audit = ("audit", llama_folder, "--out", tmp_path / "out")
    assert "--recorded" in aparte(*audit, "--reveal").err
    for option in (["--cuts", "2,2"], ["--quick"], ["--wire", "float32"], ["--attacks", "mlp"]):
        refused = aparte(*audit, "--recorded", recording, *option)
        assert refused.code == 2
        assert f"{option[0]} has no use" in refused.err
    assert "one defence" in aparte(*audit, "--recorded", recording, "--defences", "none,int8").err
    assert "not a recording" in aparte("record", "show", llama_folder / "config.json").err


def test_the_library_records_all_its_sessions(llama_folder: Path, tmp_path: Path) -> None:
    with running_server(llama_folder) as (_, url):
        with Aparte.connect(
            str(llama_folder), cloud=url, cut=Cut(), dtype="float32", record=tmp_path / "r"
        ) as model:
            model.generate(PROMPT, max_new_tokens=3)
        assert len(read_recording(tmp_path / "r").messages) > 4
        with pytest.raises(UserError, match="target local has none"):
            Aparte.connect(str(llama_folder), target="local", record=tmp_path / "l")
