"""The log's two forms, and what it keeps quiet about."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from aparte.cloud.journal import Visit, set_up, write
from aparte.errors import UserError


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


def logged(form: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    set_up(form, level, stream)
    return stream


def test_json_is_an_object_per_line() -> None:
    stream = logged("json")
    visit = Visit(7, "alice")
    visit.began(resumed=False)
    visit.steps, visit.bytes_up = 3, 1000
    visit.ended(parked=True)
    start, end = map(json.loads, stream.getvalue().splitlines())
    assert start["event"] == "session_start"
    assert (start["session"], start["token"], start["resumed"]) == (7, "alice", False)
    assert start["level"] == "info"
    assert start["time"].endswith("Z")
    assert (end["event"], end["parked"], end["steps"], end["bytes_up"]) == ("session_end", True, 3, 1000)
    assert end["seconds"] >= 0


def test_text_is_a_line_per_event() -> None:
    stream = logged("text")
    write(logging.WARNING, "refused", code="denied", nothing=None)
    assert stream.getvalue().partition(" ")[2] == "warning refused code=denied\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_of_other_libraries_only_origin_and_kind_are_told(form: str) -> None:
    stream = logged(form, "debug")
    try:
        raise ValueError("tensor([-0.731, 2.5])")
    except ValueError:
        logging.getLogger("asyncio").exception("frame %s", b"Bearer hush-hush")
    assert "asyncio" in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    for secret in ("-0.731", "hush", "frame", "Traceback"):
        assert secret not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


def test_the_level_holds() -> None:
    stream = logged("json", "error")
    write(logging.INFO, "session_start", session=1)
    write(logging.ERROR, "session_error", session=1, code="internal")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["session_error"]


@pytest.mark.parametrize(
    ("form", "level", "known"), [("xml", "info", "text, json"), ("text", "loud", "debug")]
)
def test_unknown_names_are_told_with_the_known_ones(form: str, level: str, known: str) -> None:
    with pytest.raises(UserError, match=known):
        set_up(form, level)
