"""Microsoft Presidio as a finder of names and places, where it is installed (the ``pseudonyms`` extra).

It runs on this machine. It needs a language model of spaCy, which is used if it is there and never
downloaded: a text that is about to be hidden is no occasion to call anybody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aparte.privacy.finders import Finder, Span

#: English models of spaCy, the best first.
SPACY_MODELS = ("en_core_web_trf", "en_core_web_lg", "en_core_web_md", "en_core_web_sm")
#: Presidio's own scale, from 0 to 1. A name from spaCy has 0.85, a pattern without context less.
LEAST_SCORE = 0.4
#: What it is asked for, as what kind of stand-in; numbers of all sorts keep their shape. Not for addresses of
#: e-mail: to check them it would fetch a list of domains, and the built-in pattern finds them.
KINDS = {
    "PERSON": "name",
    "ORGANIZATION": "name",
    "LOCATION": "place",
    "IBAN_CODE": "iban",
    "PHONE_NUMBER": "number",
    "CREDIT_CARD": "number",
    "CRYPTO": "number",
    "IP_ADDRESS": "number",
    "MEDICAL_LICENSE": "number",
    "US_BANK_NUMBER": "number",
    "US_DRIVER_LICENSE": "number",
    "US_ITIN": "number",
    "US_PASSPORT": "number",
    "US_SSN": "number",
    "UK_NHS": "number",
    "UK_NINO": "number",
}


class PresidioMissing(Exception):
    """It cannot be used here; the message says what is missing."""


def presidio_finder() -> Finder:
    """Loads it, which takes seconds. Raises :class:`PresidioMissing` where it is not installed."""
    try:
        import spacy
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import NlpEngineProvider
    except ImportError:
        raise PresidioMissing("Presidio is not installed; pip install 'aparte[pseudonyms]' adds it") from None
    name = next((model for model in SPACY_MODELS if spacy.util.is_package(model)), None)
    if name is None:
        raise PresidioMissing(
            "Presidio has no language model; python -m spacy download en_core_web_lg fetches one"
        )
    provider = NlpEngineProvider(
        nlp_configuration={
            "nlp_engine_name": "spacy",
            "models": [{"lang_code": "en", "model_name": name}],
        }
    )
    engine: Any = AnalyzerEngine(nlp_engine=provider.create_engine(), supported_languages=["en"])
    wanted = [kind for kind in KINDS if kind in engine.get_supported_entities("en")]

    def find(text: str) -> Iterable[Span]:
        found = engine.analyze(text=text, language="en", entities=wanted, score_threshold=LEAST_SCORE)
        for one in found:
            yield Span(one.start, one.end, KINDS[one.entity_type])

    return find
