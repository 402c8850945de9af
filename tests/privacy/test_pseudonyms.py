"""What is hidden comes back, in whatever pieces; and what is hidden is not in what the model sees."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aparte.errors import UserError
from aparte.privacy.finders import Listed, Names, Span, find_patterns
from aparte.privacy.pseudonyms import Pseudonyms
from aparte.text.stream import Detokenizer
from tiny import tiny_tokenizer

NAMES = ("Anna Smith", "Anna", "Zoë", "Strauß", "O'Neil", "王小明", "Acme GmbH", "Łukasz")
LISTED = tuple(map(Listed, NAMES))


def pseudonyms(*listed: Listed, seed: int = 0) -> Pseudonyms:
    return Pseudonyms(listed or LISTED, draw=random.Random(seed))


def answered(names: Pseudonyms, text: str, size: int = 1) -> str:
    """The model says ``text``, in pieces of ``size`` characters."""
    restorer = names.restorer()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(map(restorer.feed, pieces)) + restorer.finish()


@pytest.mark.parametrize(
    "text",
    [
        "Anna Smith, born 12.03.1984, lives with Zoë; call +49 30 1234567 or anna@acme.example.",
        "ANNA SMITH! anna smith? (Anna)'s, Annas Auto, “Anna”, Anna-Zoë, anna/zoë",
        "Zoe\u0308 and Zoë and ZOË are one",
        "STRAUSS, Strauß, strauß; O\u2019Neil and O'Neil\u2019s",
        "我叫王小明\uff0c王小明王小明。abc王小明def",
        "Send 4000 1234 5678 9010 to DE89370400440532013000 by 2024-12-24",
        "[Anna](mailto:zoe@x.example) **Anna** _Anna_ `Anna`",
        "aNNa and AnnA",
        "Anna\nSmith, Anna  Smith",
        "⟦Anna⟧ ⟦ ⟧",
        "nothing to hide",
        "",
    ],
)
def test_a_text_comes_back(text: str) -> None:
    names = pseudonyms()
    hidden = names.hide(text)
    whole = unicodedata.normalize("NFC", text)
    for size in (1, 2, 3, 7, 1000):
        assert answered(names, hidden, size) == whole
    assert hidden == names.hide(text)  # and stays the same
    for name in NAMES:
        assert list(Names([name])(hidden)) == [], name


PARTS = [
    *("Anna Smith", "anna", "ANNA", "Zoë", "zoe\u0308", "Strauß", "STRAUSS", "王小明", "O'Neil"),
    *(
        " ",
        "\n",
        ".",
        "'s",
        "s",
        "-",
        "x",
        "\u017f",
        "\u0301",
        "⟦",
        "⟧",
        "4",
        "12345",
        "+49 30 123456",
        "a@b.example",
    ),
    *("Clara", "Adela", "Conrad Oakley", "1984-03-12"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3))).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 5))
@settings(max_examples=120, deadline=None)
def test_any_conversation_comes_back(texts: list[str], seed: int) -> None:
    names = pseudonyms(seed=seed)
    hidden = [names.hide(text) for text in texts]
    # The last text with all that is known by then; earlier ones were checked when they were hidden.
    assert answered(names, hidden[-1], size=2) == unicodedata.normalize("NFC", texts[-1])


def test_the_same_name_is_the_same_throughout() -> None:
    names = pseudonyms()
    first = names.hide("Anna Smith called.")
    second = names.hide("Then ANNA SMITH's phone rang, and Anna answered.")
    stand_in = first.removesuffix(" called.")
    assert stand_in.upper() + "'s" in second
    assert stand_in.split()[0] in second  # Anna is part of Anna Smith
    assert answered(names, f"{stand_in.split()[1]} it is") == "Smith it is"


def test_a_part_with_a_stand_in_of_its_own_keeps_it() -> None:
    names = pseudonyms(Listed("Anna Smith"), Listed("Smith", "Lena"))
    hidden = names.hide("Anna Smith, Smith")
    assert hidden.endswith(", Lena")
    last = hidden.split(",")[0].split()[-1]
    assert answered(names, f"Dear Ms {last}, dear Lena") == "Dear Ms Smith, dear Smith"


def test_what_another_finder_found_once_is_replaced_everywhere() -> None:
    def find(text: str) -> Iterable[Span]:
        at = text.find("Dr. Will Stone")
        return [Span(at + 4, at + 14, "name")] if at >= 0 else []

    names = Pseudonyms((), [find], random.Random(1))
    hidden = names.hide("Will Stone wrote: Dr. Will Stone will come.")
    assert "Stone" not in hidden
    assert hidden.endswith(" will come.")  # the verb is no name
    assert "Stone" not in names.hide("Thanks, Will Stone")


def test_a_stand_in_that_the_text_brings_along_is_somebody_else() -> None:
    names = pseudonyms(Listed("Anna", "Lena"), Listed("Ben"))
    hidden = names.hide("Anna knows Lena, LENA and Ben.")
    assert hidden.startswith("Lena knows ")
    assert hidden.count("Lena") == 1
    assert answered(names, hidden) == "Anna knows Lena, LENA and Ben."
    # Also if it comes before the name.
    names = pseudonyms(Listed("Anna", "Lena"))
    assert "Lena" not in names.hide("Lena is here.")
    assert answered(names, names.hide("Anna met Lena")) == "Anna met Lena"


def test_what_the_model_said_is_never_chosen_as_a_stand_in() -> None:
    for seed in range(20):
        names = pseudonyms(Listed("Anna"), seed=seed)
        other = pseudonyms(Listed("Anna"), seed=seed)
        taken = other.hide("Anna")
        names.answered(f"Say hello to {taken}.")
        assert names.hide("Anna") != taken


def test_names_that_the_model_splits_over_tokens() -> None:
    """Token by token through a real tokenizer, stand-ins come in fragments and originals come out."""
    tokenizer = tiny_tokenizer()
    names = pseudonyms()
    text = "Write to Anna Smith, Zoë and 王小明 on +49 30 1234567, says Strauß."
    ids = tokenizer(names.hide(text))["input_ids"]
    detokenizer, restorer = Detokenizer(tokenizer.decode), names.restorer()
    pieces = [restorer.feed(detokenizer.feed(token)) for token in ids]
    assert len(ids) > 50
    assert "".join(pieces) + restorer.feed(detokenizer.finish()) + restorer.finish() == text


def test_numbers_and_dates_keep_their_shape() -> None:
    names = pseudonyms()
    hidden = names.hide("call +49 30 1234567, born 12.03.1984, on 4 March 1990, DE89 3704 0044 0532 0130 00")
    shape = "".join("9" if char.isdecimal() else char for char in hidden)
    assert shape.startswith("call +99 99 9999999, born 99.99.9999, on 9 ")
    assert shape.endswith(" 9999, DE99 9999 9999 9999 9999 99")
    assert not any(digits in hidden for digits in ("1234567", "12.03.1984", "1990", "3704"))


def test_two_sessions_draw_different_stand_ins() -> None:
    hidden = {Pseudonyms(LISTED).hide("Anna Smith, 123456789") for _ in range(4)}
    assert len(hidden) == 4


def test_there_is_no_end_of_names() -> None:
    many = [Listed(f"Person{chr(65 + i // 26)}{chr(65 + i % 26)}") for i in range(180)]
    names = pseudonyms(*many)
    text = ", ".join(one.name for one in many)
    assert answered(names, names.hide(text), 50) == text
    assert names.count == 180


def test_listed_stand_ins_that_could_be_mistaken_are_refused() -> None:
    with pytest.raises(UserError, match="share a word"):
        pseudonyms(Listed("Anna", "Lena Berg"), Listed("Ben", "Tim Berg"))
    with pytest.raises(UserError, match="share a word"):
        pseudonyms(Listed("Anna", "Lena"), Listed("Ben", "lena"))


def test_a_finder_that_cuts_words_does_no_harm() -> None:
    names = Pseudonyms((), [lambda text: [Span(0, 3, "name")]], random.Random(0))
    hidden = names.hide("Annabel")
    assert "Ann" not in hidden
    assert answered(names, hidden) == "Annabel"


class Stuck(random.Random):
    """Always draws the same."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


def test_a_refusal_quotes_nothing() -> None:
    people = ("Anna", "Ben", "Carl", "Dan", "Emil", "Fred", "Gus", "Hal")
    names = Pseudonyms(tuple(map(Listed, people)), draw=Stuck())
    with pytest.raises(UserError, match="no stand-ins left") as error:
        names.hide(" ".join(people))
    assert not any(name in str(error.value) for name in people)


def test_without_a_list_the_patterns_work() -> None:
    names = Pseudonyms((), (find_patterns,), random.Random(0))
    hidden = names.hide("mail a.b@c.example")
    assert "a.b@c.example" not in hidden
    assert answered(names, hidden) == "mail a.b@c.example"
