"""The decoding loop: the text never depends on what was proposed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aparte.answer import Answer, Writer
from aparte.config import Cut, LinkSettings, Sampling, Stopping
from aparte.decode import Job, decode
from aparte.device import open_writer
from aparte.errors import UserError
from aparte.model.parts import Blueprint
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.settings import Decoding
from aparte.target.base import Ask
from aparte.target.local import LocalTarget
from drafters import Adversary, Oracle, all_drafters
from running import FLOAT32

PROMPT = "the cat sat on the mat and the dog sat on the log and the cat"
MODES = [
    Decoding("sequential"),
    Decoding("jacobi"),
    Decoding("lookahead", ngram=3),
    Decoding("lookahead", ngram=5),
    Decoding("lookahead", ngram=7, max_nodes=40),
    Decoding("auto"),
    Decoding("context", max_nodes=16),
]
CUTS = [Cut(1, 1), Cut(2, 2), Cut(1, 4)]


def label(value: object) -> str:
    if isinstance(value, Decoding):
        return f"{value.decode}-{value.ngram}"
    return f"cut{value}" if isinstance(value, Cut) else str(value)


@functools.cache
def writer_for(folder: Path, cut: Cut) -> Writer:
    return open_writer(Blueprint.open(folder, FLOAT32), "tiny", cut, wire="float32")


@functools.cache
def truth(folder: Path, count: int) -> tuple[list[int], list[int]]:
    """Prompt ids and the unsplit model's greedy continuation, by ``transformers`` alone."""
    prompt = writer_for(folder, Cut(2, 2)).codec.encode(PROMPT)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
    )
    return prompt, output[0, len(prompt) :].tolist()


def write(
    writer: Writer,
    prompt: Sequence[int],
    drafter: Drafter,
    count: int,
    *,
    eos: frozenset[int] = frozenset(),
    stop: tuple[str, ...] = (),
    sampling: Sampling | None = None,
    max_nodes: int = 16,
) -> Answer:
    writer.codec.eos = eos
    writer.forget()
    answer, pieces = writer.write(
        prompt,
        drafter,
        sampling=sampling or Sampling(),
        decoding=Decoding("sequential", max_nodes=max_nodes),
        stopping=Stopping(count, stop),
    )
    text = "".join(piece.text for piece in pieces)
    assert text == answer.text
    return answer


@pytest.mark.parametrize("cut", CUTS, ids=label)
@pytest.mark.parametrize("mode", MODES, ids=label)
def test_greedy_equals_the_unsplit_model(tiny_folder: Path, cut: Cut, mode: Decoding) -> None:
    """60 tokens, well past the sliding window of the tiny Mistral."""
    prompt, expected = truth(tiny_folder, 60)
    answer = write(writer_for(tiny_folder, cut), prompt, make_drafter(mode), 60, max_nodes=mode.node_limit)
    assert answer.token_ids == expected
    assert answer.round_trips <= 60


@pytest.mark.parametrize("name", ["oracle", "adversary", "random", "broken"])
def test_no_drafter_changes_the_text(tiny_folder: Path, name: str) -> None:
    prompt, expected = truth(tiny_folder, 60)
    drafter = all_drafters([*prompt, *expected])[name]
    answer = write(writer_for(tiny_folder, Cut(2, 2)), prompt, drafter, 60)
    assert answer.token_ids == expected


def test_an_oracle_is_fully_accepted_and_an_adversary_never(llama_folder: Path) -> None:
    prompt, expected = truth(llama_folder, 60)
    writer = writer_for(llama_folder, Cut(2, 2))
    best = write(writer, prompt, Oracle([*prompt, *expected], block=5), 60)
    assert best.round_trips == 10
    assert best.mat == 6.0
    assert all(step.accepted == step.drafted + 1 for step in best.steps)
    worst = write(writer, prompt, Adversary([*prompt, *expected], block=5), 60)
    assert worst.round_trips == 60
    assert worst.mat == 1.0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, seed=1),
        Sampling(temperature=1.3, top_k=20, seed=2),
        Sampling(temperature=1.0, top_p=0.8, min_p=0.05, seed=3),
    ],
)
def test_a_seed_gives_the_same_text_with_every_drafter(tiny_folder: Path, sampling: Sampling) -> None:
    writer = writer_for(tiny_folder, Cut(2, 2))
    prompt, _ = truth(tiny_folder, 60)
    expected = write(writer, prompt, Nothing(), 40, sampling=sampling).token_ids
    assert expected != truth(tiny_folder, 60)[1][:40]
    for mode in MODES:
        assert write(writer, prompt, make_drafter(mode), 40, sampling=sampling).token_ids == expected
    for drafter in all_drafters([*prompt, *expected]).values():
        assert write(writer, prompt, drafter, 40, sampling=sampling).token_ids == expected
    other = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, seed=99)
    assert write(writer, prompt, Nothing(), 40, sampling=other).token_ids != expected


def test_one_round_trip_per_step_whatever_is_rejected(llama_folder: Path) -> None:
    """A rejection costs no second message (design section 3)."""
    prompt, expected = truth(llama_folder, 60)
    target = LocalTarget(Blueprint.open(llama_folder, FLOAT32))
    submitted: list[int] = []
    original = target.submit

    def counting(step: Any, tokens: Sequence[int], ask: Ask) -> None:
        submitted.append(len(step))
        original(step, tokens, ask)

    target.submit = counting  # type: ignore[method-assign]
    job = Job(tuple(prompt), Sampling(), 30, frozenset(), max_nodes=8)
    blocks = list(decode(target, Session(), Adversary([*prompt, *expected]), job))
    assert [token for block in blocks for token in block.tokens] == expected[:30]
    assert len(submitted) == len(blocks) == 30


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 13])
def test_the_limit_holds_inside_an_accepted_block(llama_folder: Path, block: int, limit: int) -> None:
    prompt, expected = truth(llama_folder, 60)
    answer = write(writer_for(llama_folder, Cut(2, 2)), prompt, Oracle([*prompt, *expected], block), limit)
    assert answer.token_ids == expected[:limit]
    assert answer.finish_reason == "length"
    assert sum(step.accepted for step in answer.steps) == limit


@pytest.mark.parametrize("block", [1, 4, 7])
def test_any_end_token_stops_inside_an_accepted_block(tiny_folder: Path, block: int) -> None:
    prompt, expected = truth(tiny_folder, 60)
    place = next(i for i in range(6, 60) if expected[i] not in expected[:i])
    later = next((t for t in expected[place + 1 :] if t not in expected[: place + 1]), 299)
    drafter = Oracle([*prompt, *expected], block)
    answer = write(
        writer_for(tiny_folder, Cut(2, 2)), prompt, drafter, 60, eos=frozenset([later, expected[place]])
    )
    assert answer.token_ids == expected[: place + 1]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("block", [1, 4, 7])
def test_a_stop_string_stops_inside_an_accepted_block(llama_folder: Path, block: int) -> None:
    prompt, expected = truth(llama_folder, 60)
    writer = writer_for(llama_folder, Cut(2, 2))
    whole = write(writer, prompt, Nothing(), 60).text
    stop = whole[20:24]
    answer = write(writer, prompt, Oracle([*prompt, *expected], block), 60, stop=(stop, "never this"))
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    # The tokens are those up to the one that completed the stop string.
    assert answer.token_ids == expected[: len(answer.token_ids)]
    assert stop in writer.codec.decode(answer.token_ids)
    assert stop not in writer.codec.decode(answer.token_ids[:-1])


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_prompts_travel_in_chunks_of_any_size(tiny_folder: Path, chunk: int) -> None:
    prompt, expected = truth(tiny_folder, 60)
    writer = open_writer(
        Blueprint.open(tiny_folder, FLOAT32),
        "tiny",
        Cut(2, 2),
        wire="float32",
        settings=LinkSettings(prefill_chunk=chunk),
    )
    assert write(writer, prompt, make_drafter(MODES[2]), 20).token_ids == expected[:20]


def test_prefill_reports_progress_up_to_the_last_chunk(llama_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    target = LocalTarget(Blueprint.open(llama_folder, FLOAT32))
    job = Job(tuple(range(1, 101)), Sampling(), 1, frozenset(), max_nodes=4, prefill_chunk=10)
    list(decode(target, Session(), Nothing(), job, on_prefill=lambda done, total: seen.append((done, total))))
    assert seen == [(done, 100) for done in range(10, 100, 10)]


def test_a_follow_up_only_sends_what_is_new(llama_folder: Path) -> None:
    prompt, expected = truth(llama_folder, 60)
    target = LocalTarget(Blueprint.open(llama_folder, FLOAT32))
    session = Session()

    def run(tokens: Sequence[int], drafter: Drafter) -> tuple[list[int], int]:
        job = Job(tuple(tokens), Sampling(), 20, frozenset(), max_nodes=8)
        blocks = list(decode(target, session, drafter, job))
        return [token for block in blocks for token in block.tokens], blocks[0].record.nodes

    first, sent = run(prompt, Oracle([*prompt, *expected]))
    assert first == expected[:20]
    assert sent == len(prompt) + 6
    # A second turn: everything but the last token of the answer is known to the cloud.
    longer = [*prompt, *first, 7, 8, 9]
    second, sent = run(longer, Nothing())
    assert sent == 4
    # A turn that was edited: back to the shared prefix, at no extra round trip.
    edited = [*prompt[:-3], 11, 12]
    third, sent = run(edited, Nothing())
    assert sent == 2
    for tokens, answer in ((longer, second), (edited, third)):
        session = Session()
        assert run(tokens, Nothing())[0] == answer


def test_stopping_early_leaves_a_usable_session(llama_folder: Path) -> None:
    prompt, expected = truth(llama_folder, 60)
    writer = writer_for(llama_folder, Cut(2, 2))
    writer.codec.eos = frozenset()
    writer.forget()
    settings = {"sampling": Sampling(), "decoding": Decoding("sequential"), "stopping": Stopping(40)}
    answer, pieces = writer.write(prompt, Oracle([*prompt, *expected]), **settings)  # type: ignore[arg-type]
    next(pieces)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert answer.finish_reason is None
    again, pieces = writer.write([*prompt, *answer.token_ids], Nothing(), **settings)  # type: ignore[arg-type]
    list(pieces)
    assert again.steps[0].nodes == 1
    assert [*answer.token_ids, *again.token_ids] == [*expected, *again.token_ids][: len(answer.token_ids)] + (
        again.token_ids
    )
    assert again.token_ids[: 60 - len(answer.token_ids)] == expected[len(answer.token_ids) :][:40]


def test_the_context_limit_ends_the_answer(tmp_path: Path) -> None:
    from tiny import save_tiny

    folder = save_tiny("llama", tmp_path / "short", max_position_embeddings=32)
    target = LocalTarget(Blueprint.open(folder, FLOAT32))
    prompt = tuple(range(1, 25))
    job = Job(prompt, Sampling(), 1000, frozenset(), max_nodes=8)
    blocks = list(decode(target, Session(), make_drafter(MODES[2]), job))
    assert sum(len(block.tokens) for block in blocks) == 8
    assert blocks[-1].finish == "length"
    with pytest.raises(UserError, match=r"prompt has 32 tokens and the model's context 32"):
        list(decode(target, Session(), Nothing(), Job(tuple(range(1, 33)), Sampling(), 5, frozenset(), 8)))


def test_an_empty_prompt_is_refused(llama_folder: Path) -> None:
    target = LocalTarget(Blueprint.open(llama_folder, FLOAT32))
    with pytest.raises(UserError, match="empty"):
        list(decode(target, Session(), Nothing(), Job((), Sampling(), 5, frozenset(), 8)))


def test_the_step_record_adds_up(llama_folder: Path) -> None:
    prompt, expected = truth(llama_folder, 60)
    answer = write(writer_for(llama_folder, Cut(2, 2)), prompt, Oracle([*prompt, *expected]), 30)
    data = answer.to_json()
    assert data["new_tokens"] == sum(step["accepted"] for step in data["steps"]) == 30
    assert data["round_trips"] == len(data["steps"])
    assert data["mat"] == pytest.approx(30 / len(data["steps"]), abs=1e-4)
    for step in data["steps"]:
        parts = step["rtt_ms"] + step["device_ms"] + step["cloud_ms"] + step["codec_ms"]
        assert parts <= step["step_ms"] + 0.01
    assert data["bytes_up"] == sum(step["bytes_up"] for step in data["steps"])
