"""The text of an audit without ``--text``: sentences of many kinds, and made-up personal data.

All of it was written for this project. The people, numbers and addresses do not exist: names are drawn from
common ones, telephone numbers and domains from ranges reserved for examples.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from aparte.privacy.sentences import SENTENCES
from aparte.privacy.texts import Entity, Passage

#: Passages with personal data in the sample.
PERSONAL = 140
#: The two domains of the sample.
SENTENCE_DOMAIN = "sample: sentences"
PERSONAL_DOMAIN = "sample: personal data"


def _words(text: str, between: str = " ") -> list[str]:
    return text.split(between)


_FIRST = _words(
    "Anna Ben Clara David Elena Felix Grace Hugo Irene Jonas Katja Liam Maria Nils Olga Paul Rosa Samir "
    "Tara Umar Vera Wei Xenia Yusuf Zoe Amara Bruno Chiara Dmitri Emeka Farah Goran Hana Ines Jorge Kofi"
)
_LAST = _words(
    "Adler Baker Costa Dubois Eriksen Fischer Garcia Hansen Ivanov Jensen Keller Lopez Moreau Novak Okafor "
    "Patel Quinn Rossi Sato Tanaka Ulrich Vogel Walker Xu Young Zhang Berg Clarke Diaz Evans Foster Gruber"
)
_CITIES = _words(
    "Lisbon Graz Bergen Leeds Nantes Porto Ghent Turin Malmo Cork Basel Gdansk Tartu Split Seville Bath "
    "Denver Austin Halifax Perth Osaka Accra Quito Pune"
)
_STREETS = _words(
    "Mill Lane|Station Road|Garden Street|Harbour Way|Church Hill|Oak Avenue|Bridge Street|Park Row|"
    "Kings Road|Meadow Close|Victoria Terrace|North Parade",
    "|",
)
_FIRMS = _words(
    "Northwind Freight|Alder & Sons|Blue Heron Software|Castle Bakery|Delta Tiles|Evergreen Dental|"
    "Foxglove Media|Granite Insurance|Hollow Tree Books|Ironbridge Tools",
    "|",
)
_MONTHS = _words("January February March April May June July August September October November December")
_TEMPLATES = (
    "My name is {PERSON} and I would like to change the address on my account to {ADDRESS}.",
    "Please call {PERSON} back on {PHONE} before the end of the day.",
    "The patient, {PERSON}, born on {DATE}, reports pain in the left shoulder since {DATE}.",
    "Send the invoice to {EMAIL}; the order was placed by {PERSON} of {ORGANIZATION}.",
    "Can you draft a letter to {ORGANIZATION} about my order? I live at {ADDRESS} in {CITY}.",
    "{PERSON} moved from {CITY} to {CITY} in {DATE} to work for {ORGANIZATION}.",
    "I was charged twice on card {CARD}. My phone number is {PHONE}.",
    "Write a reference for {PERSON}, who has worked at {ORGANIZATION} since {DATE}.",
    "Our meeting with {PERSON} and {PERSON} takes place at {ADDRESS} on {DATE}.",
    "The refund should go to account {IBAN}, held by {PERSON}.",
    "Who is {PERSON} from {CITY}? She wrote to me from {EMAIL} this morning.",
    "Summarise this complaint: {PERSON} says that {ORGANIZATION} never delivered to {ADDRESS}.",
    "Remind me on {DATE} to send {PERSON} the contract for the flat in {CITY}.",
    "The lab results of {PERSON} were sent to {EMAIL} by mistake.",
)


def sample_passages(seed: int = 0) -> list[Passage]:
    """The sentences, and as many again with personal data drawn by ``seed``."""
    draw = random.Random(f"{seed} personal data")
    plain = [Passage(text, domain=SENTENCE_DOMAIN) for text in SENTENCES]
    return [*plain, *(_personal(draw) for _ in range(PERSONAL))]


def _personal(draw: random.Random) -> Passage:
    entities: list[Entity] = []
    text = draw.choice(_TEMPLATES)
    for kind in _MAKERS:
        while f"{{{kind}}}" in text:
            value = _MAKERS[kind](draw)
            entities.append(Entity(kind, value))
            text = text.replace(f"{{{kind}}}", value, 1)
    return Passage(text, tuple(entities), PERSONAL_DOMAIN)


def _digits(draw: random.Random, count: int) -> str:
    return "".join(str(draw.randrange(10)) for _ in range(count))


def _name(draw: random.Random) -> str:
    return f"{draw.choice(_FIRST)} {draw.choice(_LAST)}"


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "PERSON": _name,
    "ADDRESS": lambda draw: f"{draw.randrange(1, 200)} {draw.choice(_STREETS)}",
    "CITY": lambda draw: draw.choice(_CITIES),
    "ORGANIZATION": lambda draw: draw.choice(_FIRMS),
    "DATE": lambda draw: f"{draw.randrange(1, 29)} {draw.choice(_MONTHS)} {draw.randrange(1950, 2025)}",
    "PHONE": lambda draw: f"01632 960{_digits(draw, 3)}",
    "EMAIL": lambda draw: f"{draw.choice(_FIRST).lower()}.{draw.choice(_LAST).lower()}@example.com",
    "CARD": lambda draw: " ".join(["4000", *(_digits(draw, 4) for _ in range(3))]),
    "IBAN": lambda draw: f"XX{_digits(draw, 2)} {_digits(draw, 4)} {_digits(draw, 4)} {_digits(draw, 4)}",
}
