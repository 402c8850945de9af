"""How questions begin: by themselves, with words of ours, or with a passage of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aparte.bridge.corpus import write_shard
from aparte.bridge.openers import ABOUT_TEXT, OPENERS
from aparte.bridge.questions import LEAST, MOST, Questions, read_paragraphs
from aparte.bridge.teacher import Teacher
from aparte.bridge.template import read_template
from aparte.errors import UserError
from aparte.text.tokenizer import Codec

PARAGRAPHS = [
    f"the cat number {number} sat on the mat and the dog sat on the log " * 3 for number in range(5)
]


def test_without_texts_half_of_them_begin_with_words_of_ours(llama_folder: Path) -> None:
    codec = Codec(llama_folder)
    questions = Questions(codec, (), 0)
    drawn = [questions.draw() for _ in range(400)]
    assert not any(opening.whole for opening in drawn)
    begun = [opening.tokens for opening in drawn if opening.tokens]
    assert 150 < len(begun) < 250
    assert set(begun) <= {tuple(codec.encode_piece(words)) for words in OPENERS}


def test_with_texts_half_of_them_quote_a_passage(llama_folder: Path) -> None:
    codec = Codec(llama_folder)
    questions = Questions(codec, PARAGRAPHS, 0)
    drawn = [questions.draw() for _ in range(400)]
    about = [opening for opening in drawn if len(opening.tokens) > LEAST]
    assert 150 < len(about) < 250
    assert 0 < sum(opening.whole for opening in about) < len(about)
    frames = [(codec.encode_piece(before), codec.encode_piece(after)) for before, after, _ in ABOUT_TEXT]
    for opening in about:
        framed = any(
            list(opening.tokens[: len(before)]) == before
            and list(opening.tokens[len(opening.tokens) - len(after) :]) == after
            and LEAST <= len(opening.tokens) - len(before) - len(after) <= MOST
            for before, after in frames
        )
        assert framed
    assert sum("sat on the mat" in codec.decode(list(opening.tokens)) for opening in about) == len(about)


def test_same_seed_same_questions(llama_folder: Path) -> None:
    def drawn(seed: int) -> list[object]:
        questions = Questions(Codec(llama_folder), PARAGRAPHS, seed)
        return [questions.draw() for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_whole_question_is_answered_at_once(teacher: Teacher, llama_folder: Path) -> None:
    """And its passage is not taken for an answer."""
    template, codec = read_template(Codec(llama_folder)), Codec(llama_folder)
    shard = write_shard(teacher, llama_folder, 8, 700, 3, paragraphs=PARAGRAPHS)
    between, found = list(template.to_answer), 0
    for tokens, answer in zip(shard.tokens.tolist(), shard.answer.tolist(), strict=True):
        starts = [place for place in range(len(tokens)) if tokens[place : place + len(between)] == between]
        for place in starts:
            after = place + len(between)
            assert not any(answer[place + 1 : after])
            if after < len(tokens):
                assert answer[after]
        asked = [token for token, of_answer in zip(tokens, answer, strict=True) if not of_answer]
        found += "sat on the mat" in codec.decode(asked)
    assert found >= 2
    assert not torch.equal(shard.tokens, write_shard(teacher, llama_folder, 8, 700, 3).tokens)


def test_paragraphs_are_long_lines(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("= heading =\n" + "  " + "word " * 40 + "\nshort\n", encoding="utf-8")
    assert read_paragraphs([file]) == [("word " * 40).strip()]
    assert read_paragraphs([]) == []


@pytest.mark.parametrize(("content", "says"), [(b"= heading =\n", "paragraph"), (b"\xff\xfe\x00", "read")])
def test_files_without_text(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_paragraphs([file])
    with pytest.raises(UserError, match="cannot be read"):
        read_paragraphs([tmp_path / "none.txt"])
