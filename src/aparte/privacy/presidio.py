"""Microsoft Presidio as a finder, where it is installed (the ``pseudonyms`` extra).

It runs on this machine. Its patterns find numbers of many kinds and check them (cards, bank accounts,
telephones). People, places and organisations it finds only with a trained language model of spaCy. Such a
model is used if it is there and never downloaded: a text that is about to be hidden is no occasion to call
anybody. Without one Presidio gets an empty pipeline, which finds no name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from aparte.errors import UserError
from aparte.privacy.finders import Finder, Span

#: English models of spaCy, the best first.
SPACY_MODELS = ("en_core_web_trf", "en_core_web_lg", "en_core_web_md", "en_core_web_sm")
#: Presidio's own scale, from 0 to 1. A name from spaCy has 0.85, a pattern without context less.
LEAST_SCORE = 0.4
#: What only a language model finds, as what kind of stand-in.
NAMES = {"PERSON": "name", "ORGANIZATION": "name", "LOCATION": "place"}
#: What patterns find; numbers of all sorts keep their shape. Not addresses of e-mail: to check them it would
#: fetch a list of domains, and the built-in pattern finds them.
NUMBERS = {
    "IBAN_CODE": "iban",
    **dict.fromkeys(
        (
            "PHONE_NUMBER",
            "CREDIT_CARD",
            "CRYPTO",
            "IP_ADDRESS",
            "MAC_ADDRESS",
            "MEDICAL_LICENSE",
            "US_BANK_NUMBER",
            "US_DRIVER_LICENSE",
            "US_ITIN",
            "US_PASSPORT",
            "US_SSN",
            "UK_NHS",
            "UK_NINO",
        ),
        "number",
    ),
}
KINDS = NAMES | NUMBERS


class PresidioMissing(Exception):
    """It cannot be used here; the message says what is missing."""


class Presidio(NamedTuple):
    """The finder, and the language model that it finds names with; empty if it finds none."""

    finder: Finder
    model: str


def presidio_finder(model: str | None = None) -> Presidio:
    """Loads it, which takes seconds.

    ``model`` is an installed spaCy model or a folder that holds one; without it the best English one that is
    installed is taken. Raises :class:`PresidioMissing` where Presidio is not installed, and
    :class:`UserError` if there is no such model.
    """
    try:
        import spacy
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import SpacyNlpEngine
    except ImportError:
        raise PresidioMissing("Presidio is not installed; pip install 'aparte[pseudonyms]' adds it") from None
    # It warns of models and recognisers by the dozen, which says nothing to whoever asked for an answer.
    logging.getLogger("presidio-analyzer").setLevel(logging.ERROR)
    name = model or next((name for name in SPACY_MODELS if spacy.util.is_package(name)), "")
    pipeline: Any
    if name:
        if not (spacy.util.is_package(name) or Path(name).is_dir()):
            raise UserError(
                f"There is no spaCy model {name!r} on this machine. Install it (python -m spacy download "
                f"{name} fetches one of spaCy's), or give the folder that holds it."
            )
        try:
            pipeline = spacy.load(name)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(
                f"The spaCy model {name!r} cannot be loaded ({type(error).__name__}). Install it for this "
                "version of spaCy, or leave --spacy-model out."
            ) from None
    else:
        pipeline = spacy.blank("en")
    engine: Any = SpacyNlpEngine(models=[{"lang_code": "en", "model_name": name or "none"}])
    engine.nlp = {"en": pipeline}  # loaded here, so that it loads, and downloads, nothing
    analyzer: Any = AnalyzerEngine(nlp_engine=engine, supported_languages=["en"])
    kinds = KINDS if name else NUMBERS
    wanted = [kind for kind in kinds if kind in analyzer.get_supported_entities("en")]

    def find(text: str) -> Iterable[Span]:
        found = analyzer.analyze(text=text, language="en", entities=wanted, score_threshold=LEAST_SCORE)
        for one in found:
            yield Span(one.start, one.end, kinds[one.entity_type])

    return Presidio(find, name)
