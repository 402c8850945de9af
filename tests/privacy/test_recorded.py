"""Attacks on recordings: the states that were sent give the text back; and what there is nothing in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte.answer import Answer
from aparte.config import Cut, Sampling, Stopping
from aparte.device import open_draft_writer, open_writer
from aparte.errors import UserError
from aparte.measure.recorded import summary
from aparte.model.parts import Blueprint
from aparte.privacy.guard import protect
from aparte.privacy.protection import Protection
from aparte.privacy.recorded import audit_recording, committed_path, traffic_of
from aparte.privacy.recorded_report import sentences, write_results
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.wire.playback import visits
from aparte.wire.record import Recorder, read_recording
from aparte.wire.tensors import TensorCodec
from running import FLOAT32
from tiny import save_tiny

PROMPT = "The ship leaves the harbour on Monday."


def quiet(label: str, done: int, total: int) -> None:
    pass


def record(
    folder: Path,
    path: Path,
    *,
    decode: str = "auto",
    tokens: int = 10,
    defence: str = "none",
    wire: str = "float16",
) -> tuple[Answer, list[int]]:
    """An answer by a middle in this process; what it was, and the prompt's tokens."""
    recorder = Recorder(path)
    writer = open_writer(
        Blueprint.open(folder, FLOAT32),
        "tiny",
        Cut(),
        wire=wire,
        record=recorder,  # type: ignore[arg-type]
    )
    if defence != "none":
        protect(writer.target, Protection(defence), writer.codec)
    prompt = writer.codec.encode(PROMPT)
    decoding = Decoding(decode, in_flight=1)
    answer = writer.complete(
        prompt,
        make_drafter(decoding),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(tokens),
    )
    writer.target.close()
    recorder.close()
    return answer, prompt


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of real proportions, more dimensions than are needed to tell its tokens apart."""
    return save_tiny("llama", tmp_path_factory.mktemp("wide"), hidden_size=64, head_dim=16)


@pytest.mark.parametrize("decode", ["sequential", "auto"])
def test_the_path_is_the_text_that_the_cloud_got(llama_folder: Path, tmp_path: Path, decode: str) -> None:
    answer, prompt = record(llama_folder, tmp_path / "r", decode=decode)
    (visit,) = visits(read_recording(tmp_path / "r").messages)
    path, rejected = committed_path(visit, TensorCodec("float16", 32))
    # Whether the last step's guesses were right is not in it, and the last token was never sent.
    last = answer.steps[-1].accepted
    assert len(path) == len(prompt) + len(answer.token_ids) - last
    assert rejected >= answer.steps[-1].nodes - 1
    traffic = traffic_of(visit, path)
    assert traffic["tokens"] == len(path)
    assert traffic["messages_up"] == len(visit.exchanges)


def test_a_prompt_that_was_answered_by_one_token(llama_folder: Path, tmp_path: Path) -> None:
    _, prompt = record(llama_folder, tmp_path / "r", decode="sequential", tokens=1)
    (visit,) = visits(read_recording(tmp_path / "r").messages)
    path, rejected = committed_path(visit, TensorCodec("float16", 32))
    assert (len(path), rejected) == (len(prompt), 0)


@pytest.mark.parametrize("defence", ["none", "int8"])
def test_vocabulary_matching_reads_the_recording(wide_folder: Path, tmp_path: Path, defence: str) -> None:
    answer, prompt = record(wide_folder, tmp_path / "r", defence=defence)
    results, texts = audit_recording(wide_folder, tmp_path / "r", FLOAT32, quiet, defence=defence)
    (row,) = results["sessions"]
    assert results["by"] == "distance"
    assert row["found_share"] == 1.0
    assert row["positions"] >= len(prompt)
    assert texts[0].startswith(PROMPT)
    told = " ".join(sentences(results))
    assert "100.0%" in told
    file = write_results(results, tmp_path / "out")
    assert "harbour" not in file.read_text(encoding="utf-8") + told
    assert json.loads(file.read_text(encoding="utf-8")) == results
    assert answer.token_ids


def test_a_recording_of_another_model_is_refused(
    llama_folder: Path, wide_folder: Path, tmp_path: Path
) -> None:
    record(llama_folder, tmp_path / "r", tokens=2)
    with pytest.raises(UserError, match="Name the model that was recorded"):
        audit_recording(wide_folder, tmp_path / "r", FLOAT32, quiet)
    with pytest.raises(UserError, match="without random-cut"):
        audit_recording(llama_folder, tmp_path / "r", FLOAT32, quiet, defence="random-cut:1-3")


def test_in_draft_mode_there_is_nothing_to_attack(llama_folder: Path, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    writer = open_draft_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", record=recorder)
    decoding = Decoding("context", in_flight=1)
    writer.complete(
        writer.codec.encode(PROMPT),
        make_drafter(decoding),
        sampling=Sampling(),
        decoding=decoding,
        stopping=Stopping(4),
    )
    writer.target.close()
    recorder.close()
    with pytest.raises(UserError, match="gets the text itself"):
        audit_recording(llama_folder, tmp_path / "r", FLOAT32, quiet)
    (session,) = summary(read_recording(tmp_path / "r"))["sessions"]
    assert session["steps"][0]["norm_up"] is None
    assert session["nodes"] > 0


def test_an_empty_recording(llama_folder: Path, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.describe(
        {"target": "split", "model": "tiny", "cut": "2,2", "wire": "float16", "width": 32, "layers": 6}
    )
    recorder.close()
    with pytest.raises(UserError, match="holds no steps"):
        audit_recording(llama_folder, tmp_path / "r", FLOAT32, quiet)
    assert summary(read_recording(tmp_path / "r"))["sessions"] == []


def test_the_summary_tells_sizes_times_and_lengths(llama_folder: Path, tmp_path: Path) -> None:
    _, prompt = record(llama_folder, tmp_path / "r", decode="sequential", tokens=4)
    found = summary(read_recording(tmp_path / "r"))
    assert found["about"]["model"] == "tiny"
    (session,) = found["sessions"]
    first, *rest = session["steps"]
    assert first["nodes"] == len(prompt)
    assert [step["nodes"] for step in rest] == [1, 1, 1]
    for step in session["steps"]:
        assert step["wait_ms"] > 0
        assert step["norm_up"] > 0
        assert step["norm_down"] > 0
        assert step["bytes_up"] > 64 * step["nodes"]
    assert session["bytes_up"] == sum(step["bytes_up"] for step in session["steps"])
