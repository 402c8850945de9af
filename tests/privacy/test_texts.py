"""Texts from files and from the sample, and their split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte.errors import UserError
from aparte.privacy.sample import PERSONAL, sample_passages
from aparte.privacy.sentences import SENTENCES
from aparte.privacy.texts import Entity, Passage, cut_to_length, load_passages, split

LINES = [f"This is the line with the number {number}." for number in range(12)]


def test_lines_of_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("= Title =\n\n" + "\n  ".join(LINES), encoding="utf-8")
    assert [passage.text for passage in load_passages(file)] == LINES


def test_json_with_spans(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    spans = [{"entity_type": "PERSON", "entity_value": "Anna", "start_position": 0}]
    items = [{"full_text": "Anna is here.", "spans": spans, "masked": "…"}, {"full_text": "Nobody is here."}]
    file.write_text(json.dumps(items), encoding="utf-8")
    first, second = load_passages(file)
    assert first == Passage("Anna is here.", (Entity("PERSON", "Anna"),))
    assert second == Passage("Nobody is here.")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe\x00", "cannot be read"),
        ("a.txt", b"one line that is long enough\n", "fewer than two"),
        ("a.json", b"{", "not a list of objects"),
        ("a.json", b'[{"text": "x"}]', "not a list of objects"),
        ("a.json", b"[1, 2]", "not a list of objects"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_passages(tmp_path / name)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_passages(tmp_path / "missing.txt")


def test_halves_share_no_text() -> None:
    passages = [Passage(line) for line in LINES * 3]
    victims, others = split(passages, 5, seed=1)
    assert len(victims) == 5
    assert {p.text for p in victims} | {p.text for p in others} == set(LINES)
    assert not {p.text for p in victims} & {p.text for p in others}


def test_at_most_half_is_attacked_and_the_seed_decides() -> None:
    passages = [Passage(line) for line in LINES]
    assert len(split(passages, 100, 0)[0]) == 6
    assert split(passages, 5, 1) == split(passages, 5, 1) != split(passages, 5, 2)


def test_lengths() -> None:
    assert cut_to_length([[1], [1, 2, 3], [1, 2, 3, 4, 5]], 2, 4) == [[1, 2, 3], [1, 2, 3, 4]]


class TestSample:
    def test_its_personal_data_stands_in_the_text(self) -> None:
        passages = sample_passages()
        personal = [passage for passage in passages if passage.entities]
        assert len(personal) == PERSONAL
        assert len(passages) == PERSONAL + len(SENTENCES)
        for passage in personal:
            assert "{" not in passage.text
            assert all(entity.value in passage.text for entity in passage.entities)

    def test_sentences_differ(self) -> None:
        assert len(set(SENTENCES)) == len(SENTENCES) > 100

    def test_the_seed_draws_the_people(self) -> None:
        assert sample_passages(1) == sample_passages(1) != sample_passages(2)
