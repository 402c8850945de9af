"""Recordings: exactly what was sent and received, whatever happens to the file or the link."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from aparte.answer import Writer
from aparte.config import Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.errors import UserError
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.wire.record import MAGIC, Kind, Recorder, read_recording
from relay import relay_to
from running import FLOAT32, running_server

ABOUT = {"target": "split", "model": "tiny"}


def recorded(path: Path, *messages: bytes, most_bytes: int = 1 << 20) -> Recorder:
    recorder = Recorder(path, most_bytes)
    recorder.describe(ABOUT)
    tape = recorder.tape()
    for message in messages:
        tape.up(message)
    return recorder


def answer(writer: Writer) -> list[int]:
    return writer.complete(
        list(range(20, 60)),
        make_drafter(Decoding("auto")),
        sampling=Sampling(),
        decoding=Decoding("auto"),
        stopping=Stopping(8),
    ).token_ids


def test_it_holds_the_messages_of_the_socket_byte_for_byte(llama_folder: Path, tmp_path: Path) -> None:
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    with running_server(llama_folder, token="hush-hush") as (_, url), relay_to(url) as relay:
        recorder = Recorder(tmp_path / "r")
        writer = open_writer(
            blueprint, "tiny", Cut(), cloud=relay.url, wire="float16", token="hush-hush", record=recorder
        )
        assert answer(writer)
        writer.target.close()
        recorder.close()
        up, down = relay.recording.messages_up, relay.recording.messages_down
    recording = read_recording(tmp_path / "r")
    assert [bytes(m.data) for m in recording.messages if m.kind is Kind.UP] == up
    assert [bytes(m.data) for m in recording.messages if m.kind is Kind.DOWN] == down
    assert len(up) > 2
    assert not recording.cut_short
    assert {k: recording.about[k] for k in ("target", "model", "cut", "wire", "width", "layers")} == {
        "target": "split",
        "model": "tiny",
        "cut": "2,2",
        "wire": "float16",
        "width": 32,
        "layers": 6,
    }
    times = [message.at_s for message in recording.messages]
    assert times == sorted(times)
    assert b"hush-hush" not in (tmp_path / "r").read_bytes()
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


def test_a_middle_in_this_process_is_recorded_too(llama_folder: Path, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    writer = open_writer(Blueprint.open(llama_folder, FLOAT32), "tiny", Cut(), record=recorder)
    answer(writer)
    writer.target.close()
    recorder.close()
    kinds = [message.kind for message in read_recording(tmp_path / "r").messages]
    assert kinds[0] is Kind.OPENED
    assert kinds.count(Kind.UP) == kinds.count(Kind.DOWN) > 0


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    with pytest.raises(UserError, match="never replaces"):
        Recorder(tmp_path / "r")
    assert (tmp_path / "r").read_text() == "mine"
    with pytest.raises(UserError, match="cannot be written"):
        Recorder(tmp_path / "no" / "folder")


def test_a_recording_of_nothing_leaves_no_file(tmp_path: Path) -> None:
    Recorder(tmp_path / "r").close()
    assert not (tmp_path / "r").exists()


def test_at_its_limit_it_ends_and_stays_whole(tmp_path: Path) -> None:
    recorder = recorded(tmp_path / "r", b"a" * 400, b"b" * 400, b"c" * 400, b"d", most_bytes=1200)
    recorder.close()
    found = read_recording(tmp_path / "r")
    assert [bytes(m.data)[:1] for m in found.messages] == [b"a", b"b"]
    assert not found.cut_short
    assert "its limit" in recorder.failure


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorded(tmp_path / "r", b"one")
    real, left = os.write, [10]

    def write(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0], count = 0, left[0]
        return real(descriptor, data[:count])

    monkeypatch.setattr(os, "write", write)
    recorder.tape().up(b"two" * 100)
    monkeypatch.undo()
    recorder.tape().up(b"three")
    recorder.close()
    assert "No space left" in recorder.failure
    found = read_recording(tmp_path / "r")
    assert [bytes(m.data) for m in found.messages] == [b"one"]
    assert not found.cut_short


def test_a_device_that_was_killed_leaves_all_but_the_last_record(tmp_path: Path) -> None:
    recorded(tmp_path / "r", b"one", b"two" * 100).close()
    content = (tmp_path / "r").read_bytes()
    for missing in (1, 100, 305):
        (tmp_path / "r").write_bytes(content[:-missing])
        found = read_recording(tmp_path / "r")
        assert [bytes(m.data) for m in found.messages] == [b"one"]
        assert found.cut_short


def test_several_links_share_a_recording(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.describe(ABOUT)
    recorder.describe({"model": "another"})  # the first one counts

    def talk(text: bytes) -> None:
        tape = recorder.tape()
        for _ in range(200):
            tape.up(text * 50)

    threads = [threading.Thread(target=talk, args=(bytes([65 + n]),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    found = read_recording(tmp_path / "r")
    assert found.about["model"] == "tiny"
    assert len(found.messages) == 800
    by_link: dict[int, set[bytes]] = {}
    for message in found.messages:
        by_link.setdefault(message.link, set()).add(bytes(message.data))
    assert sorted(map(len, by_link.values())) == [1] * 4


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a recording"),
        (b"PK\3\4 something else", "not a recording"),
        (MAGIC, "not a recording"),
        (MAGIC + b"\0\0\0\2[]", "damaged"),
        (MAGIC + b'\0\0\0\x0a{"format":', "damaged"),
        (MAGIC + b"\xff\xff\xff\xff{}", "damaged"),
        (MAGIC + b'\0\0\0\x0c{"format":9}', "another version"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(UserError, match=told):
        read_recording(tmp_path / "r")
    with pytest.raises(UserError, match="cannot be read"):
        read_recording(tmp_path / "missing")
