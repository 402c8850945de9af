"""What is found in a text, and the user's list."""

from __future__ import annotations

from pathlib import Path

import pytest

from aparte.errors import UserError
from aparte.privacy.finders import Listed, Names, Span, find_patterns, merged, read_names


def found(text: str) -> list[tuple[str, str]]:
    return [(span.kind, text[span.start : span.end]) for span in merged(list(find_patterns(text)))]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("write to anna.smith+x@mail.example.org.", "email", "anna.smith+x@mail.example.org"),
        ("call +49 30 1234567 today", "number", "+49 30 1234567"),
        ("call (030) 123-4567!", "number", "(030) 123-4567"),
        ("call +49 (0)30 1234567", "number", "+49 (0)30 1234567"),
        ("pay DE89 3704 0044 0532 0130 00 now", "iban", "DE89 3704 0044 0532 0130 00"),
        ("GB82WEST12345698765432", "iban", "GB82WEST12345698765432"),
        ("born 1984-03-12.", "date", "1984-03-12"),
        ("geboren am 12.03.1984", "date", "12.03.1984"),
        ("on 3/12/84,", "date", "3/12/84"),
        ("on 12 March 1984", "date", "12 March 1984"),
        ("on March 12th, 1984", "date", "March 12th, 1984"),
        ("am 12. März 1984", "date", "12. März 1984"),
        ("postcode 90210", "number", "90210"),
        ("card 4000 1234 5678 9010.", "number", "4000 1234 5678 9010"),
        ("1,000,000 people", "number", "1,000,000"),
        ("passport C01X00T47a7", "number", "C01X00T47a7"),
        ("at 192.168.100.12", "number", "192.168.100.12"),
    ],
)
def test_patterns(text: str, kind: str, value: str) -> None:
    assert found(text) == [(kind, value)]


@pytest.mark.parametrize(
    "text", ["in 2019, 30 people", "12 * 7 = 84", "1, 2, 3, 4, 5, 6", "a1b2", "x@y", "3.14"]
)
def test_small_numbers_stay(text: str) -> None:
    assert found(text) == []


def names_in(text: str, *names: str) -> list[str]:
    return [text[span.start : span.end] for span in merged(list(Names(names)(text)))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Anna met ANNA and anna and aNNa.", ["Anna", "ANNA", "anna", "aNNa"]),
        ("Anna's, Annas, Anna\u2019s", ["Anna", "Anna", "Anna"]),
        ("Annabel, Joanna, Anna1, Annass", []),
        ("Anna\u0301", []),
        ("Anna  Smith\nAnna\nSmith", ["Anna  Smith", "Anna\nSmith"]),
        ("Anna Smithson", ["Anna"]),
        ("我叫王小明。王小明的书", ["王小明", "王小明"]),
        ("Strauß STRAUSS strauß", ["Strauß", "STRAUSS", "strauß"]),
        ("O'Neil (O'NEIL) o'neil's", ["O'Neil", "O'NEIL", "o'neil"]),
        ("C++ rocks", ["C++"]),
    ],
)
def test_listed_names(text: str, expected: list[str]) -> None:
    assert names_in(text, "Anna", "Anna Smith", "王小明", "Strauß", "O'Neil", "C++") == expected


def test_names_that_overlap_each_other_or_themselves_are_covered_whole() -> None:
    assert names_in("Anna Smith Jones", "Anna Smith", "Smith Jones") == ["Anna Smith Jones"]
    assert names_in("Ann Ann Ann", "Ann Ann") == ["Ann Ann Ann"]


def test_merged_takes_the_kind_of_the_longest() -> None:
    spans = [Span(0, 4, "number"), Span(2, 9, "email"), Span(12, 13, "name"), Span(5, 5, "name")]
    assert merged(spans) == [Span(0, 9, "email"), Span(12, 13, "name")]


def test_a_list(tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text("# friends\n\nAnna  Smith\nZoe\u0308 = Lena\n  王小明  \n", encoding="utf-8")
    assert read_names(file) == (Listed("Anna Smith"), Listed("Zoë", "Lena"), Listed("王小明"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"Anna =\n", "Line 1 of"),
        (b"\n= Lena\n", "Line 2 of"),
        (b"Anna\nANNA\n", "second time"),
        (b"Zo\xeb\n", "cannot be read"),
    ],
)
def test_a_broken_list_is_named_and_not_quoted(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "names.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=sentence) as error:
        read_names(file)
    assert "Anna" not in str(error.value)
