"""Many devices at one cloud: real processes with tiny models, and what is made of their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from aparte.config import Compute, Cut
from aparte.errors import AparteError, UserError
from aparte.measure.load import Client, Load, Row, _Answers, measure
from aparte.measure.passes import Passes
from aparte.measure.wan_link import WanProfile

FLOAT32 = Compute("float32", "cpu")


def load(model: str, **settings: object) -> Load:
    return Load(model, Cut(), FLOAT32, WanProfile(rtt_ms=5), **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_devices_in_company_write_what_one_alone_writes(llama_folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def progress(label: str, done: int, total: int) -> None:
        seen.append((label, done, total))

    wanted = load(str(llama_folder), clients=(1, 2), seconds=0.7, repeats=2, max_new_tokens=12, unsplit=True)
    report = measure(wanted, progress)
    assert report["identical"] is True
    assert report["answers"] >= 6
    one, two = report["rows"]
    assert (one["clients"], two["clients"]) == (1, 2)
    assert one["ratio_to_one"] == 1.0
    assert two["ratio_to_one"] == pytest.approx(two["tok_s"] / one["tok_s"], rel=0.01)
    for row in (one, two):
        assert row["tok_s"] > 0
        assert row["steps"] > 0
        assert 5 <= row["step_p50_ms"] <= row["step_p95_ms"]
        assert 0 <= row["queue_p50_ms"] <= row["queue_p95_ms"]
        assert 0 < row["cloud_p50_ms"] < row["step_p50_ms"]
        assert row["nodes_per_step"] == row["tokens_per_step"] == 1
        assert row["passes"] > 0
        assert 1 <= row["pass_sessions"] <= row["clients"]
        assert row["pass_nodes"] > row["pass_sessions"], "prompts are among them"
    assert report["unsplit_tok_s"] > one["tok_s"]  # which waits for its link
    assert report["one_to_unsplit"] == pytest.approx(one["tok_s"] / report["unsplit_tok_s"], rel=0.01)
    assert ("rounds", 6, 6) in seen
    assert ("starting devices", 2, 2) in seen


def test_a_device_that_fails_says_why(llama_folder: Path) -> None:
    with (
        Client(load(str(llama_folder)), "ws://127.0.0.1:1", "token", 0) as client,
        pytest.raises(AparteError, match=r"device of the measurement failed: .*cannot be reached"),
    ):
        client.receive()


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"clients": ()}, "numbers from 1 on"),
        ({"clients": (1, 0)}, "numbers from 1 on"),
        ({"seconds": 0.0}, "must be positive"),
        ({"seconds": float("nan")}, "must be positive"),
        ({"repeats": 0}, "at least 1"),
        ({"decode": "nonsense"}, "nonsense"),
    ],
)
def test_what_cannot_be_measured(settings: dict[str, object], cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        load("model", **settings)


def test_a_row_is_made_of_all_its_steps() -> None:
    steps = [
        {"step_ms": float(n), "queue_ms": n / 10, "cloud_ms": 7.0, "nodes": 1 + n % 2, "tokens": 1}
        for n in range(100, 0, -1)
    ]
    passes = Passes(count=50.0, seconds=1.0, nodes=400.0, sessions=100.0)
    row = Row(4, tok_s=[3.0, 1.0, 2.0], steps=steps, passes=passes).to_json()
    assert row == {
        "clients": 4,
        "tok_s": 2.0,
        "step_p50_ms": 50.0,
        "step_p95_ms": 95.0,
        "queue_p50_ms": 5.0,
        "queue_p95_ms": 9.5,
        "cloud_p50_ms": 7.0,
        "cloud_p95_ms": 7.0,
        "steps": 100,
        "nodes_per_step": 1.5,
        "tokens_per_step": 1,
        "passes": 50,
        "pass_ms": 20.0,
        "pass_nodes": 8.0,
        "pass_sessions": 2.0,
    }


def test_a_row_without_steps_has_no_times() -> None:
    row = Row(1, tok_s=[0.0]).to_json()
    assert row["step_p50_ms"] is None
    assert row["queue_p95_ms"] is None
    assert row["nodes_per_step"] is row["pass_ms"] is None


def test_answers_that_differ_are_noticed() -> None:
    answers = _Answers()
    answers.add([{"prompt": 0, "token_ids": [1, 2, 3]}, {"prompt": 1, "token_ids": [4]}])
    answers.add([{"prompt": 0, "token_ids": [1, 2]}, {"prompt": 1, "token_ids": [4, 5]}])
    assert answers.identical
    answers.add([{"prompt": 1, "token_ids": [4, 6]}])
    assert not answers.identical
