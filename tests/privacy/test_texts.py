"""Texts from files and from the sample, and their split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte.errors import UserError
from aparte.privacy.sample import PERSONAL, sample_passages
from aparte.privacy.sentences import SENTENCES
from aparte.privacy.texts import Entity, Passage, cut_to_length, domains_of, load_passages, split, windows

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
    assert first == Passage("Anna is here.", (Entity("PERSON", "Anna"),), "data.json")
    assert second == Passage("Nobody is here.", domain="data.json")


def test_questions_by_line(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"turns": ["Who was Ada?", "When?"], "category": "qa"}, {"turns": ["Add 1 and 2."]}]
    file.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [p.text for p in load_passages(file)] == ["Who was Ada?", "When?", "Add 1 and 2."]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe\x00", "cannot be read"),
        ("a.txt", b"one line that is long enough\n", "fewer than two"),
        ("a.json", b"{", "does not hold objects"),
        ("a.json", b'[{"text": "x"}]', "does not hold objects"),
        ("a.json", b"[1, 2]", "does not hold objects"),
        ("a.jsonl", b'{"turns": ["x"]}\n{"turns"', "does not hold objects"),
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


def test_every_domain_is_attacked_alike() -> None:
    passages = [Passage(f"{domain} {line}", domain=domain) for domain in ("a", "b", "c") for line in LINES]
    victims, others = split(passages, 9, 0)
    assert [sum(p.domain == domain for p in victims) for domain in ("a", "b", "c")] == [3, 3, 3]
    assert domains_of(passages) == ["a", "b", "c"]
    assert {p.domain for p in victims[:4]} != {"a"}, "the first few are of several"
    assert len(victims) + len(others) == len(passages)


def test_windows_hold_all_of_a_text_and_then_begin_elsewhere() -> None:
    text = list(range(10))
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert windows([text], 3, 4) == [first, second, [2, 3, 4, 5], [6, 7, 8, 9]]
    assert windows([[1, 2]], 3, 4) == []


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
