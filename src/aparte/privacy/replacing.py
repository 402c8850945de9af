"""What is replaced before a model sees it: a list of names, and what finds more than is listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aparte.errors import UserError
from aparte.privacy.finders import Finder, Listed, find_patterns, read_names
from aparte.privacy.presidio import PresidioMissing, presidio_finder
from aparte.privacy.pseudonyms import Pseudonyms


@dataclass(frozen=True)
class Replacing:
    """The settings of ``--pseudonyms``; ``sentence`` says for people what is replaced."""

    names: Sequence[Listed]
    finders: Sequence[Finder]
    sentence: str

    def conversation(self) -> Pseudonyms:
        """The stand-ins of one more conversation.

        Raises :class:`UserError` for listed stand-ins that could be mistaken.
        """
        return Pseudonyms(self.names, self.finders)


def read_replacing(file: Path | None, spacy_model: str | None = None) -> Replacing | None:
    """The names in ``file`` and what finds more of them; None without one.

    ``spacy_model`` is the language model by which Presidio finds names: an installed one, or a folder.
    """
    if file is None:
        if spacy_model is not None:
            raise UserError("--spacy-model finds names for --pseudonyms. Give that too, or leave it out.")
        return None
    names = read_names(file)
    finders: list[Finder] = [find_patterns]
    try:
        finder, model = presidio_finder(spacy_model)
        finders.append(finder)
        more = (
            f"and what Presidio finds with the language model {model}"
            if model
            else "and the numbers that Presidio knows. Other names stay as they are: there is no language "
            "model of spaCy to find them (python -m spacy download en_core_web_lg fetches one)"
        )
    except PresidioMissing as missing:
        if spacy_model is not None:
            raise UserError(f"--spacy-model needs Presidio. {missing}.") from None
        more = f"and nothing else ({missing})"
    sentence = (
        f"The model sees stand-ins for {len(names)} listed names, for e-mail addresses, dates and "
        f"numbers of five digits or more, {more}."
    )
    return Replacing(names, finders, sentence)
