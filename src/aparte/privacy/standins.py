"""Inventing stand-ins: what looks like the original to a model, and says nothing of it.

A name becomes another name, a number one of the same shape. Nothing is derived from the original but its
shape; the rest is drawn at random, anew in every session.
"""

from __future__ import annotations

import random
import re
import string

from aparte.privacy.finders import MONTHS

_FIRST = (
    "Adela Albin Alva Ansel Ardis Armand Astrid Aurel Beatrix Belinda Benno Bertil Bianca Boris "
    "Camilla Casper Cecily Cedric Clarissa Conrad Cosima Cyrus Dagmar Damian Delphine Desmond Dora Edgar "
    "Edwin Elvira Emeric Enid Erwin Esmond Eugenia Fabian Fenna Fergus Flavia Florian Gerda Gilbert Greta "
    "Gudrun Gunnar Hedwig Helmut Henrik Hilda Horatio Imogen Ingrid Isolde Ivor Jorun Josefa Kaspar "
    "Kirsten Konrad Lambert Leander Leopold Linnea Lorenz Lothar Ludmila Magnus Malwine Marius Mathilde "
    "Merrick Minna Mirabel Mortimer Nadine Norbert Odette Olaf Ophelia Orson Osmund Otilia Pelle Percival "
    "Philippa Quentin Ragnar Raimund Roderick Roswitha Rupert Salome Sebald Sigrid Silvan Solveig "
    "Sybil Tabitha Thaddeus Theodora Tilda Torben Ulrika Valeria Viktor Wanda Wendel Wilma Winfred "
    "Xaver Yorick Zelda Zeno"
)
_LAST = (
    "Abernathy Ahlberg Arkwright Ashdown Barlow Beckford Bellamy Birkholm Brandvold Cardew Carlow "
    "Castellan Cavendish Colbert Corrigan Culver Dahlberg Dalton Darrow Delacroix Dunmore Ekdahl Ellery "
    "Engstrom Fairbank Falkner Fenwick Forsberg Gadsby Galbraith Garrick Glaser Haldane Halloran "
    "Hartnell Haverford Hedlund Hollander Ingram Jardine Jessop Kestrel Kirchner Lachlan Langford Larkin "
    "Lindqvist Lockhart Mallory Marchetti Mercer Merriman Montrose Nordahl Norwood Oakley Ostrander "
    "Pemberton Pettersen Quigley Radcliff Rasmussen Redfern Rosendahl Rutherford Sandoval Selkirk Sherwin "
    "Sinclair Stanhope Sutcliff Tavener Thornton Tilney Trevelyan Underhill Vandermeer Varga "
    "Wainwright Waldron Westbrook Whitlock Winslow Wyndham Yardley Zeller"
)
_PLACES = (
    "Aldford Ambleton Arnsdorf Ashbourne Belmont Bramwell Brookhaven Carrick Clearwater Dunfield Eastmere "
    "Elmstadt Fairhaven Glenbrook Grunau Halden Harrowgate Ilmenau Kingsmere Lakeview Larchmont Lindenau "
    "Maplewood Millbrook Newbridge Norwick Oakdale Ostheim Pinehurst Ravensburg Redwater Rosenau Silverton "
    "Stonefield Sunderby Thornbury Valmont Waldheim Westerby Winterberg"
)
_SYLLABLES = "ba be da de fa ga ha ka la le li lo ma mi na ne no ra re ri ro sa se ta te ti va ve vi za"
#: Draws from the lists; after that, names of syllables, of which there is no end.
LISTED_TRIES = 60


def invent(kind: str, original: str, draw: random.Random, attempt: int) -> str:
    """A stand-in for ``original``. ``attempt`` counts from 0; a later one may have to be stranger."""
    if kind == "date":
        return _date(original, draw)
    if kind == "email":
        return f"{_word(_FIRST, draw, attempt)}.{_word(_LAST, draw, attempt)}@example.com".lower()
    if kind == "iban":
        return original[:2] + _reshaped(original[2:], draw)
    if kind == "place":
        return _word(_PLACES, draw, attempt)
    if kind == "number" and any(char.isdecimal() for char in original):
        more = [draw.choice(string.digits) for _ in range(attempt // LISTED_TRIES)]
        return "".join([draw.choice(string.digits) if char.isdecimal() else char for char in original] + more)
    first = _word(_FIRST, draw, attempt)
    return f"{first} {_word(_LAST, draw, attempt)}" if len(original.split()) > 1 else first


def _word(words: str, draw: random.Random, attempt: int) -> str:
    if attempt < LISTED_TRIES:
        return draw.choice(words.split())
    return "".join(draw.choice(_SYLLABLES.split()) for _ in range(3 + attempt // LISTED_TRIES)).capitalize()


def _reshaped(text: str, draw: random.Random) -> str:
    """Other digits for digits, other capitals for capitals."""
    return "".join(
        draw.choice(string.digits)
        if char.isdecimal()
        else draw.choice(string.ascii_uppercase)
        if char.isupper()
        else char
        for char in text
    )


def _date(text: str, draw: random.Random) -> str:
    """Another day in the same spelling: numbers below 13 for day and month, a year of the last century."""

    def number(match: re.Match[str]) -> str:
        digits = match[0]
        if len(digits) == 4:
            return str(draw.randrange(1930, 2030))
        return str(draw.randrange(1, 13 if len(digits) == 2 else 10)).zfill(len(digits))

    def month(match: re.Match[str]) -> str:
        names = next(names for names in MONTHS if match[0] in names)
        return draw.choice(names)

    names = "|".join(name for months in MONTHS for name in months)
    return re.sub(rf"\b(?:{names})\b", month, re.sub(r"\d+", number, text))
