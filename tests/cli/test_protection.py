"""``--defence``, ``--constant-shape``, ``--pseudonyms``, and the line about what the cloud can recover."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte.config import Compute, Cut
from aparte.model.parts import Blueprint
from aparte.privacy.restore import restore
from aparte.privacy.verdict import keep
from cli.command import Command
from running import running_server

EXACT = ("--dtype", "float32", "--wire", "float32", "--max-new-tokens", 12)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def names(tmp_path: Path) -> Path:
    file = tmp_path / "names.txt"
    file.write_text("Anna Smith\nZoë = Lena\n", encoding="utf-8")
    return file


def test_rounding_and_shape_leave_the_text_alone_in_every_mode(aparte: Command, llama_folder: Path) -> None:
    base = ("generate", llama_folder, "the cat and the dog", *EXACT, "--json")
    plain = aparte(*base).json
    assert aparte(*base, "--constant-shape", 6).json["token_ids"] == plain["token_ids"]
    rounded = aparte(*base, "--defence", "int3").json
    assert rounded["token_ids"] != plain["token_ids"]
    shaped = aparte(*base, "--defence", "int3", "--constant-shape", "6@1", "--decode", "sequential").json
    assert shaped["token_ids"] == rounded["token_ids"]
    assert len({step["bytes_up"] for step in shaped["steps"][1:]}) == 1


def test_each_session_draws_a_cut_and_writes_the_same(aparte: Command, llama_folder: Path) -> None:
    given = ("generate", llama_folder, "the cat", *EXACT, "--json", "--cut", "1,1")
    plain = aparte(*given).json
    drawn = [aparte(*given, "--defence", "random-cut:1-4").json for _ in range(6)]
    assert all(answer["token_ids"] == plain["token_ids"] for answer in drawn)
    cuts = {answer["cut"] for answer in drawn}
    assert cuts <= {"1,1", "2,1", "3,1", "4,1"}
    assert len(cuts) > 1, "six alike draws of four come once in a thousand runs"


def test_one_cloud_serves_the_cut_that_was_drawn(aparte: Command, llama_folder: Path) -> None:
    given = ("generate", llama_folder, "the cat", *EXACT, "--cut", "1,1", "--defence", "random-cut:3-4")
    with running_server(llama_folder, Cut(1, 1), inner=True) as (_, url):
        result = aparte(*given, "--cloud", url)
    assert result.code == 0, result.err
    assert "The cut of this session is" in result.err
    with running_server(llama_folder, Cut(1, 1)) as (_, url):
        refused = aparte(*given, "--cloud", url)
    assert refused.code == 2
    assert "--inner-cuts" in refused.err


def test_noise_runs(aparte: Command, llama_folder: Path) -> None:
    result = aparte("generate", llama_folder, "the cat", *EXACT, "--defence", "noise:1000000", "--json")
    assert result.code == 0
    assert result.json["new_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--defence", "magic"], "Known: none"),
        (["--defence", "random-cut:1-3"], "Draw from 2 on"),
        (["--defence", "random-cut:2-9"], "leaves nothing for the cloud"),
        (["--defence", "random-cut:2-3", "--target", "draft"], "--target split"),
        (["--spacy-model", "en_core_web_sm"], "--spacy-model finds names for --pseudonyms"),
        (["--defence", "int8", "--target", "draft"], "--target split"),
        (["--constant-shape", "8", "--target", "local"], "--target split"),
        (["--constant-shape", "x"], "16@200"),
        (["--constant-shape", "8", "--in-flight", "2"], "Leave out"),
        (["--pseudonyms", "nowhere.txt"], "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_mistakes(
    aparte: Command, llama_folder: Path, command: str, options: list[str], sentence: str
) -> None:
    prompt = ["hi"] if command == "generate" else []
    result = aparte(command, llama_folder, *prompt, *options)
    assert result.code == 2
    assert sentence in result.err


@pytest.mark.parametrize("target", ["split", "draft"])
def test_the_model_never_sees_what_is_listed(
    aparte: Command, llama_folder: Path, names: Path, target: str
) -> None:
    """A stand-in is as long as a name, so the number of tokens alone says little: the text is the test."""
    prompt = "Zoë and Zoë"
    given = ("generate", llama_folder, prompt, "--raw", *EXACT, "--target", target, "--json")
    hidden = aparte(*given, "--pseudonyms", names).json
    as_listed = ("generate", llama_folder, "Lena and Lena", *given[3:])
    assert hidden["token_ids"] == aparte(*as_listed).json["token_ids"]
    assert hidden["token_ids"] != aparte(*given).json["token_ids"]


def test_stand_ins_in_the_answer_are_restored(aparte: Command, llama_folder: Path, tmp_path: Path) -> None:
    """A word that the model is known to write is listed as a stand-in: the original is shown.

    A stop string, in which names are replaced too, mentions it without changing the prompt.
    """
    given = ("generate", llama_folder, "the cat", *EXACT)
    text = aparte(*given, "--json").json["text"]
    parts = {text[at : at + size] for size in (2, 3, 4) for at in range(len(text) - size)}
    word = min(part for part in parts if part.isalnum() and restore(text, {part: "Kassandra"}) != text)
    file = tmp_path / "list.txt"
    file.write_text(f"Kassandra = {word}\n", encoding="utf-8")
    given = (*given, "--pseudonyms", file, "--stop")
    said = aparte(*given, "Kassandra, who is not there", "--json").json
    assert said["text"] == restore(text, {word: "Kassandra"})
    stopped = aparte(*given, "Kassandra", "--json").json
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == said["text"][: said["text"].index("Kassandra")]
    printed = aparte(*given, "Kassandra, who is not there")
    assert printed.out == said["text"] + "\n"
    assert "stand-ins for 1 listed names" in printed.err


def test_a_conversation_keeps_its_stand_ins_and_its_beginning(
    aparte: Command, llama_folder: Path, names: Path
) -> None:
    result = aparte(
        *("chat", llama_folder, *EXACT, "--pseudonyms", names, "--json", "--system", "Zoë asks"),
        stdin=b"Anna Smith, 12345678\nAnna Smith again\n",
    )
    first, second = map(json.loads, result.out.splitlines())
    assert second["reused_tokens"] >= first["prompt_tokens"]


class TestPrivacyLine:
    def line(self, aparte: Command, folder: Path, url: str, *options: object) -> str:
        result = aparte("generate", folder, "the cat", *EXACT, "--cloud", url, *options)
        assert result.code == 0
        return " ".join(line for line in result.err.splitlines() if line.startswith("The cloud receives"))

    def test_it_says_what_the_audit_found(self, aparte: Command, llama_folder: Path) -> None:
        with running_server(llama_folder) as (_, url):
            general = self.line(aparte, llama_folder, url)
            assert "can reconstruct" in general
            assert "see `aparte audit`" in general
            row = {"name": "vocabulary", "cut": "2,2", "defence": "none", "target": "prompt", "top1": 0.987}
            blueprint = Blueprint.open(llama_folder, Compute("float32", "cpu"))
            keep(blueprint, {"attacks": [row]})
            assert "recovered 98.7 % of the prompt" in self.line(aparte, llama_folder, url)
            # Nothing was found for this defence, so nothing is claimed for it.
            assert self.line(aparte, llama_folder, url, "--defence", "int8") == general
