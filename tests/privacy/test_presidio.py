"""Presidio as a finder, where it is installed; and what is said where it is not."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from aparte.errors import UserError
from aparte.privacy.finders import find_patterns
from aparte.privacy.presidio import SPACY_MODELS, Presidio, PresidioMissing, presidio_finder
from aparte.privacy.pseudonyms import Pseudonyms

TEXT = (
    "My name is David Johnson and I live in Berlin. My phone number is 212-555-1234, my card is "
    "4111 1111 1111 1111, my machine is at 10.20.30.40 and my account GB33BUKB20201555555555."
)
NUMBERS = ("212-555-1234", "4111 1111 1111 1111", "10.20.30.40", "GB33BUKB20201555555555")


@pytest.fixture(scope="module")
def spacy() -> Any:
    pytest.importorskip("presidio_analyzer", reason="the extra `pseudonyms` is not installed")
    return pytest.importorskip("spacy")


@pytest.fixture(scope="module")
def patterns(spacy: Any) -> Presidio:
    """Presidio on a machine without any language model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spacy.util, "is_package", lambda name: False)
        return presidio_finder()


@pytest.fixture(scope="module")
def trained(spacy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline on disk that knows David Johnson and Berlin, as a trained one would, in spaCy's labels."""
    pipeline = spacy.blank("en")
    ruler = pipeline.add_pipe("entity_ruler")
    ruler.add_patterns(
        [{"label": "PERSON", "pattern": "David Johnson"}, {"label": "GPE", "pattern": "Berlin"}]
    )
    folder = tmp_path_factory.mktemp("spacy") / "model"
    pipeline.to_disk(folder)
    return folder


def there_and_back(finder: Any, text: str) -> str:
    """What the model would see; the answer is restored from it."""
    names = Pseudonyms((), (find_patterns, finder), random.Random(0))
    hidden = names.hide(text)
    restorer = names.restorer()
    assert restorer.feed(hidden) + restorer.finish() == text
    return hidden


def test_it_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(PresidioMissing, match=r"pip install 'aparte\[pseudonyms\]'"):
        presidio_finder()


def test_without_a_language_model_it_finds_numbers_and_no_names(patterns: Presidio) -> None:
    assert patterns.model == ""
    found = {TEXT[span.start : span.end] for span in patterns.finder(TEXT)}
    assert found >= set(NUMBERS)
    assert not any("Johnson" in text or "Berlin" in text for text in found)
    hidden = there_and_back(patterns.finder, TEXT)
    assert "David Johnson" in hidden
    assert not any(number in hidden for number in NUMBERS)


def test_numbers_that_only_it_knows(patterns: Presidio) -> None:
    """A network card's address with too few digits for our own patterns."""
    text = "The printer is ab:cd:ef:ab:cd:1f on the list."
    assert not list(find_patterns(text))
    assert "ab:cd:ef:ab:cd:1f" not in there_and_back(patterns.finder, text)


def test_a_language_model_in_a_folder_finds_people_that_nobody_listed(trained: Path) -> None:
    finder, model = presidio_finder(str(trained))
    assert model == str(trained)
    hidden = there_and_back(finder, TEXT)
    assert not any(text in hidden for text in ("Johnson", "Berlin", *NUMBERS))


def test_an_installed_model_finds_people(spacy: Any) -> None:
    if not any(spacy.util.is_package(name) for name in SPACY_MODELS):
        pytest.skip("no English model of spaCy is installed")
    hidden = there_and_back(presidio_finder().finder, TEXT)
    assert "Johnson" not in hidden
    assert "Berlin" not in hidden


def test_a_model_that_there_is_not_is_not_fetched(spacy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spacy.cli, "download", lambda *args: pytest.fail("it would download"))
    with pytest.raises(UserError, match="no spaCy model 'xx_nothing'"):
        presidio_finder("xx_nothing")


def test_a_folder_that_is_no_model(spacy: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        presidio_finder(str(tmp_path))
