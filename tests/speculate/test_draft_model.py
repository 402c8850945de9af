"""The draft model: its guesses are its model's logits, whatever was drafted and rolled back before."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from aparte.answer import Writer
from aparte.config import Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.drafts import open_draft_model
from aparte.errors import MismatchError, UserError
from aparte.model.parts import Blueprint
from aparte.speculate.draft_model import CHUNK, DraftModel, check_vocabulary
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.merge import Merged
from aparte.speculate.neural import Guess, Neural
from aparte.speculate.settings import Decoding
from aparte.text.tokenizer import Codec
from cli.command import Command
from running import FLOAT32, tokens_of_target
from tiny import save_tiny

PROMPT = "the cat sat on the mat and the dog sat on the log and the cat"


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model than the tiny ones, of another family, with the same tokens."""
    return save_tiny("qwen3", tmp_path_factory.mktemp("draft") / "draft", layers=2, seed=7)


@functools.cache
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@functools.cache
def expected(folder: Path, tokens: tuple[int, ...], vocab_size: int, top: int) -> Guess:
    """What Hugging Face thinks comes after ``tokens``, computed from nothing."""
    logits = reference(folder)(torch.tensor([tokens])).logits[0, -1, :vocab_size]
    best = logits.softmax(-1).topk(top)
    return Guess(tuple(best.indices.tolist()), tuple(best.values.tolist()))


def assert_same(actual: Guess, wanted: Guess) -> None:
    assert actual.probabilities == pytest.approx(wanted.probabilities, rel=1e-3, abs=1e-6)
    assert actual.tokens == wanted.tokens


def model_of(folder: Path, **options: Any) -> DraftModel:
    blueprint = Blueprint.open(folder, FLOAT32)
    return DraftModel(blueprint, options.pop("vocab_size", blueprint.vocab_size), **options)


class Checked:
    """Asks a draft model and compares every guess with Hugging Face's."""

    def __init__(self, folder: Path, vocab_size: int = 300, **options: Any) -> None:
        self.model = model_of(folder, vocab_size=vocab_size, top=4, **options)
        self._folder = folder
        self._vocab_size = vocab_size
        self._context: tuple[int, ...] = ()
        self._paths: list[tuple[int, ...]] = []

    def begin(self, context: list[int]) -> None:
        guess = self.model.begin(context)
        assert guess is not None
        self._context, self._paths = tuple(context), []
        self._compare(guess, ())

    def extend(self, parents: list[int], tokens: list[int]) -> None:
        guesses = self.model.extend(parents, tokens)
        assert len(guesses) == len(tokens)
        for parent, token, guess in zip(parents, tokens, guesses, strict=True):
            path = (*(self._paths[parent] if parent >= 0 else ()), token)
            self._paths.append(path)
            self._compare(guess, path)

    @property
    def nodes(self) -> int:
        return len(self._paths)

    def path(self, node: int) -> tuple[int, ...]:
        return self._paths[node]

    def _compare(self, guess: Guess, path: tuple[int, ...]) -> None:
        assert_same(guess, expected(self._folder, (*self._context, *path), self._vocab_size, 4))


def test_level_by_level_every_guess_is_the_models(tiny_folder: Path) -> None:
    """Every family; chains, branches, and a later branch below an early node."""
    checked = Checked(tiny_folder)
    checked.begin(list(range(5, 25)))
    checked.extend([-1, -1, -1], [30, 31, 32])
    checked.extend([0, 0, 2], [40, 41, 40])
    checked.extend([4, 1], [50, 51])
    checked.extend([-1, 6, 3], [33, 60, 61])


def test_a_long_context_is_read_in_chunks(tiny_folder: Path) -> None:
    checked = Checked(tiny_folder, chunk=7)
    checked.begin(list(range(10, 55)))
    checked.extend([-1], [30])
    assert CHUNK > 7


@pytest.mark.parametrize("follow", ["nothing", "part", "all", "another"])
def test_the_next_context_may_follow_the_tree_or_not(tiny_folder: Path, follow: str) -> None:
    checked, context = Checked(tiny_folder), list(range(5, 20))
    checked.begin(context)
    checked.extend([-1, -1], [30, 31])
    checked.extend([1, 0], [40, 41])
    checked.extend([2, 2], [50, 51])
    taken = {"nothing": [], "part": [31, 40], "all": [31, 40, 51], "another": [31, 99]}[follow]
    checked.begin([*context, *taken, 77])
    checked.extend([-1, -1], [30, 31])
    checked.extend([1], [40])


def test_a_context_that_ran_ahead_is_taken_back(tiny_folder: Path) -> None:
    checked, context = Checked(tiny_folder), list(range(5, 20))
    checked.begin(context)
    checked.extend([-1], [30])
    checked.extend([0], [31])
    checked.begin([*context, 30, 31, 32])  # sent ahead
    checked.extend([-1], [33])
    checked.begin([*context, 30, 44])  # wrong from the second token on
    checked.extend([-1], [45])
    checked.extend([0], [46])
    checked.begin(context)  # and once more the same
    checked.begin([3, 4, 5])  # another conversation
    checked.extend([-1], [6])


SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(st.integers(0, 2**32))
def test_random_trees_and_random_continuations(tiny_folder: Path, seed: int) -> None:
    """Whatever is drafted, accepted in part, rewound or exchanged: nothing of it shows later."""
    pick = random.Random(seed)
    checked, context = Checked(tiny_folder, chunk=pick.choice([3, 128])), [pick.randrange(5)]
    for _ in range(pick.randint(1, 4)):
        checked.begin(context)
        for _ in range(pick.randint(0, 3)):
            count = pick.randint(1, 4)
            parents = [pick.randrange(-1, checked.nodes) for _ in range(count)]
            checked.extend(parents, [pick.randrange(5) for _ in range(count)])  # few tokens: twins occur
        kind = pick.randrange(4)
        if kind < 2 and checked.nodes:  # along the tree, and one more
            context = [*context, *checked.path(pick.randrange(checked.nodes)), pick.randrange(5)]
        elif kind == 2:  # back
            context = context[: pick.randint(1, len(context))]
        else:
            context = [*context, pick.randrange(5)]


def count_rows(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every pass to come."""
    rows: list[int] = []
    forward = model._stage.forward

    def counting(cache: Any, step: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(step))
        return forward(cache, step, hidden)

    monkeypatch.setattr(model._stage, "forward", counting)
    return rows


def test_accepted_nodes_are_not_read_again(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(llama_folder)
    rows = count_rows(model, monkeypatch)
    model.begin(list(range(20)))
    model.extend([-1, -1], [30, 31])
    model.extend([1], [40])
    model.begin([*range(20), 31, 40, 50])
    model.begin([*range(20), 31, 40, 51])
    assert rows == [20, 2, 1, 1, 1]


def test_after_an_error_it_starts_from_nothing(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted pass left in the cache is unknown."""
    checked, context = Checked(llama_folder), list(range(5, 20))
    checked.begin(context)
    with monkeypatch.context() as patch:
        patch.setattr(checked.model, "_embed", lambda tokens: tokens.new_zeros(99, 1).float())
        with pytest.raises(Exception, match=r"."):
            checked.model.begin([*context, 1])
    rows = count_rows(checked.model, monkeypatch)
    checked.begin([*context, 2])
    checked.extend([-1], [30])
    assert rows == [len(context) + 1, 1]


def test_what_does_not_fit_is_not_started(llama_folder: Path) -> None:
    model = model_of(llama_folder)
    assert model.begin([1] * 511) is not None
    assert model.begin([1] * 512) is None
    assert model.begin([1, 2, 300]) is None  # a row of padding of a target that has more of them
    assert model.begin([1, 2, 3]) is not None
    with pytest.raises(ValueError, match="not a node"):
        model.extend([0], [1])
    assert model.extend([], []) == []


# -- As a drafter ----------------------------------------------------------------------------------


@functools.cache
def writer_for(folder: Path) -> Writer:
    return open_writer(Blueprint.open(folder, FLOAT32), "tiny", Cut(2, 2), wire="float32")


def write(
    folder: Path, drafter: Drafter, sampling: Sampling | None = None, max_nodes: int = 16, count: int = 40
) -> tuple[list[int], float]:
    """Tokens and MAT."""
    writer = writer_for(folder)
    writer.codec.eos = frozenset()
    writer.forget()
    answer, pieces = writer.write(
        writer.codec.encode(PROMPT),
        drafter,
        sampling=sampling or Sampling(),
        decoding=Decoding("context", max_nodes=max_nodes),
        stopping=Stopping(count),
    )
    list(pieces)
    return answer.token_ids, answer.mat


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=5)], ids=str)
@pytest.mark.parametrize(
    "mode", ["model", "model+context", "model+context+recycling+lookahead", "auto", "lookahead+context"]
)
def test_the_text_is_that_without_drafting(
    tiny_folder: Path, draft_folder: Path, mode: str, sampling: Sampling
) -> None:
    draft = "draft" if "model" in mode or mode == "auto" else None
    drafter = make_drafter(Decoding(mode, draft=draft), models={"model": model_of(draft_folder)})
    plain, _ = write(tiny_folder, Nothing(), sampling)
    assert write(tiny_folder, drafter, sampling)[0] == plain


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.2, seed=5)], ids=str)
@pytest.mark.parametrize("mode", ["model+context", "lookahead+context"])
def test_the_text_is_the_same_with_steps_sent_ahead(
    llama_folder: Path, mode: str, sampling: Sampling
) -> None:
    """The draft model is the target, so that some of what is sent ahead is right, and some not."""
    writer, decoding = (
        writer_for(llama_folder),
        Decoding(mode, max_nodes=16, in_flight=4, draft="draft" if "model" in mode else None),
    )
    plain, _ = write(llama_folder, Nothing(), sampling, count=60)
    writer.forget()
    answer, pieces = writer.write(
        writer.codec.encode(PROMPT),
        make_drafter(decoding, models={"model": model_of(llama_folder)}),
        sampling=sampling,
        decoding=decoding,
        stopping=Stopping(60),
    )
    list(pieces)
    assert answer.token_ids == plain
    assert mode != "model+context" or answer.ahead_steps


def test_one_model_serves_one_conversation_after_another(llama_folder: Path, draft_folder: Path) -> None:
    models, plain = {"model": model_of(draft_folder)}, write(llama_folder, Nothing())
    decoding = Decoding("model", draft="draft")
    runs = [write(llama_folder, make_drafter(decoding, models=models), count=40) for _ in range(2)]
    assert [tokens for tokens, _ in runs] == [plain[0]] * 2


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_a_model_that_is_the_target_is_accepted_to_its_depth(tiny_folder: Path, depth: int) -> None:
    """Greedy, only the best guess followed: each round trip commits the whole chain and one token more."""

    class Sure(DraftModel):
        """Says of its best guess that it is certain, so that no other takes its place in the tree."""

        def _guesses(self, hidden: torch.Tensor) -> list[Guess]:
            return [Guess(guess.tokens[:1], (1.0,)) for guess in super()._guesses(hidden)]

    blueprint = Blueprint.open(tiny_folder, FLOAT32)
    drafter = Merged([Neural("model", Sure(blueprint, 300), depth=depth, clock=lambda: 0.0)])
    tokens, mat = write(tiny_folder, drafter, max_nodes=64, count=(depth + 2) * 4)
    assert tokens == write(tiny_folder, Nothing(), count=(depth + 2) * 4)[0]
    assert mat == depth + 2  # the guess at the root, one per pass, and the target's own


# -- The same tokens -------------------------------------------------------------------------------


def retokenized(folder: Path, changes: dict[str, str]) -> Path:
    """Exchange tokens in ``tokenizer.json`` by new ones with their ids."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    for old, new in changes.items():
        vocab[new] = vocab.pop(old)
    data["model"]["merges"] = [
        pair for pair in data["model"]["merges"] if not {*pair, "".join(pair)} & changes.keys()
    ]
    path.write_text(json.dumps(data), encoding="utf-8")
    return folder


def test_the_same_tokens_pass(llama_folder: Path, draft_folder: Path) -> None:
    check_vocabulary(Codec(llama_folder), Codec(draft_folder), "draft")


def test_other_tokens_are_shown(llama_folder: Path, tmp_path: Path) -> None:
    changes = {"Ġof": "XX", "ll": "YY", "st": "ZZ", "om": "WW"}
    other = retokenized(save_tiny("llama", tmp_path / "other"), changes)
    with pytest.raises(MismatchError) as caught:
        open_draft_model(other, "other/model", FLOAT32, *tokens_of_target(writer_for(llama_folder)))
    message = str(caught.value)
    ids = {token: text for token, text in Codec(llama_folder).vocabulary.items() if text in changes}
    first, second, third, fourth = sorted(ids)
    assert message.startswith("The draft model other/model has 300 tokens and the model 300")
    assert "4 of 300 ids differ" in message
    for token in (first, second, third):
        assert f"{token} is {ids[token]!r} here and {changes[ids[token]]!r} there" in message
    assert f"{fourth} is" not in message
    assert "same family" in message


def test_missing_and_special_tokens_are_shown(llama_folder: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other")
    path = other / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for entry in data["added_tokens"]:
        entry["special"] = entry["content"] != "<|im_start|>"
    data["added_tokens"].append({**data["added_tokens"][0], "id": 300, "content": "<|extra|>"})
    path.write_text(json.dumps(data), encoding="utf-8")
    config = json.loads((other / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("extra_special_tokens", None)
    (other / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(MismatchError) as caught:
        check_vocabulary(Codec(llama_folder), Codec(other), "other")
    assert "has 301 tokens and the model 300" in str(caught.value)
    assert "1 of 301 ids differ: 300 is missing here and '<|extra|>' there" in str(caught.value)
    assert "2 ids are special tokens on one side only: 298 ('<|im_start|>'), 300" in str(caught.value)


def test_a_draft_model_with_more_rows_of_padding_never_drafts_them(
    llama_folder: Path, tmp_path: Path
) -> None:
    padded = save_tiny("llama", tmp_path / "padded", vocab_size=320, layers=2, seed=3)
    model = open_draft_model(padded, "draft", FLOAT32, *tokens_of_target(writer_for(llama_folder)))
    everything = model_of(padded, top=320).begin([1, 2, 3])
    assert everything is not None
    assert any(token >= 300 for token in everything.tokens[:50])  # it would like to
    guess = model.begin([1, 2, 3])
    assert guess is not None
    assert_same(guess, expected(padded, (1, 2, 3), 300, len(guess.tokens)))


def test_a_target_with_more_rows_of_padding_does_no_harm(llama_folder: Path, tmp_path: Path) -> None:
    """Were such an id ever in the text, the draft model could not read it, and offers nothing."""
    padded = save_tiny("llama", tmp_path / "padded", vocab_size=320, seed=3)
    model = open_draft_model(llama_folder, "draft", FLOAT32, *tokens_of_target(writer_for(padded)))
    assert model.begin([1, 2, 3]) is not None
    assert model.begin([1, 2, 310, 3]) is None
    plain, _ = write(padded, Nothing())
    assert write(padded, Merged([Neural("model", model)]))[0] == plain


# -- The command line ------------------------------------------------------------------------------


def test_a_draft_model_has_to_be_named() -> None:
    with pytest.raises(UserError, match=r"--decode model\+context needs a draft model.*--draft"):
        Decoding("model+context")


@pytest.mark.parametrize("mode", ["sequential", "lookahead", "context+recycling"])
def test_a_draft_model_without_use_is_refused(mode: str) -> None:
    with pytest.raises(UserError, match="no use for a draft model"):
        Decoding(mode, draft="some/model")


def test_auto_takes_up_a_draft_model() -> None:
    assert "model" in Decoding("auto", draft="some/model").sources
    assert "model" not in Decoding("auto").sources


def test_a_command_that_loads_no_models_says_so() -> None:
    with pytest.raises(UserError, match="cannot load what --decode model drafts with"):
        make_drafter(Decoding("model", draft="some/model"))


@pytest.mark.parametrize("decode", ["auto", "model"])
def test_generate_with_a_draft_model(aparte: Command, llama_folder: Path, decode: str) -> None:
    """Its own draft model: fewer round trips (how many depends on what drafting costs), the same text."""
    base = ("generate", llama_folder, "the cat", "--max-new-tokens", 24, "--dtype", "float32")
    exact = ("--wire", "float32", "--json")
    plain = aparte(*base, *exact, "--decode", "sequential").json
    drafted = aparte(*base, *exact, "--decode", decode, "--draft", llama_folder, "--max-nodes", 32).json
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["round_trips"] < plain["round_trips"]


def test_generate_refuses_another_vocabulary(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    other = retokenized(save_tiny("llama", tmp_path / "other"), {"Ġof": "XX"})
    result = aparte("generate", llama_folder, "the cat", "--draft", other)
    assert result.code == 2
    assert "1 of 300 ids differ" in result.err
