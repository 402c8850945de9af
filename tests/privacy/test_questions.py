"""Questions, and whether a defence leaves their answers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aparte.errors import UserError
from aparte.privacy.defences import Noise, Nothing
from aparte.privacy.observe import Observer
from aparte.privacy.questions import LONGEST, Question, answers, load_questions, pick, unchanged
from aparte.privacy.specimen import Specimen
from aparte.text.tokenizer import Codec
from privacy.conftest import CUT, random_texts


@pytest.fixture
def codec(specimen: Specimen) -> Codec:
    return Codec(specimen.blueprint.checkpoint.folder)


def test_a_file_as_spec_bench_has_it(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"question_id": 1, "category": "qa", "turns": ["Who?", "When?"]}, {"turns": ["Why?"]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert load_questions(file) == [Question("Who?", "qa"), Question("Why?")]


@pytest.mark.parametrize("content", ["", "{", '{"turns": []}', '{"turns": 3}', "[1]", '{"text": "x"}'])
def test_a_file_that_has_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="holds no questions"):
        load_questions(tmp_path / "bad.jsonl")


def test_every_category_is_asked_and_nothing_that_is_too_long(codec: Codec) -> None:
    questions = [Question(f"{kind} {number}", kind) for kind in "abc" for number in range(5)]
    questions.append(Question("long " * LONGEST, "d"))
    picked = [codec.decode(tokens) for tokens in pick(questions, codec, 6, 0)]
    assert len(picked) == 6
    assert all(sum(kind + " " in text for text in picked) >= 2 for kind in "abc")
    assert len(pick(questions, codec, 100, 0)) == 15
    assert pick([], codec, 5, 0) == []


def test_no_defence_changes_no_answer(specimen: Specimen) -> None:
    prompts = random_texts(5, seed=8)
    plain = answers(Observer(specimen, CUT, "float16", Nothing()), prompts, 8, lambda *_: None)
    again = answers(Observer(specimen, CUT, "float16", Nothing()), prompts, 8, lambda *_: None)
    assert [len(answer) for answer in plain] == [8] * 5
    assert unchanged(plain, again) == {"answers_same": 1, "answer_tokens_same": 1, "questions": 5}


def test_heavy_noise_changes_answers(specimen: Specimen) -> None:
    noise = Noise(epsilon=0.1)
    noise.calibrate(torch.ones(9, 32), torch.ones(9, 32))
    prompts = random_texts(5, seed=8)
    plain, mine = (
        answers(Observer(specimen, CUT, "float32", defence), prompts, 8, lambda *_: None)
        for defence in (Nothing(), noise)
    )
    assert unchanged(plain, mine)["answer_tokens_same"] < 0.5


def test_shares_are_of_answers_and_of_tokens() -> None:
    plain = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    mine = [torch.tensor([1, 2]), torch.tensor([3, 9])]
    assert unchanged(plain, mine) == {"answers_same": 0.5, "answer_tokens_same": 0.75, "questions": 2}
    assert unchanged([], [])["answers_same"] is None
