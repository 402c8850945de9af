"""What the commands have, from Python: pseudonyms, other drafting, conversations, what is learned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aparte import Aparte
from aparte.errors import UserError
from aparte.privacy.restore import restore
from aparte.speculate.memory import memory_dir

QUESTION = "Why is the sky over the sea of another colour?"
NUMBERS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "wire": "float32"}
FEW = {"max_new_tokens": 12}


@pytest.fixture(scope="module")
def model(llama_folder: Path) -> Iterator[Aparte]:
    with Aparte.connect(str(llama_folder), **NUMBERS) as model:
        yield model


class TestDrafting:
    def test_it_can_change_between_answers(self, llama_folder: Path) -> None:
        with Aparte.connect(str(llama_folder), decode="lookahead", ngram=4, max_nodes=6, **NUMBERS) as model:
            first = model.generate(QUESTION, max_new_tokens=24)
            assert first.decode == "lookahead"
            assert max(step.drafted for step in first.steps) <= 6
            model.redraft(decode="sequential")
            second = model.generate(QUESTION, max_new_tokens=24)
            assert (second.decode, second.mat, second.reused_tokens) == ("sequential", 1.0, 0)
            assert second.token_ids == first.token_ids
            with pytest.raises(UserError, match="belongs to draft mode"):
                model.redraft(draft_length=3)
            assert model.generate(QUESTION, max_new_tokens=2).decode == "sequential"

    def test_not_in_the_middle_of_one(self, model: Aparte) -> None:
        with model.stream(QUESTION, **FEW) as stream:
            next(stream)
            with pytest.raises(UserError, match="being written"):
                model.redraft(decode="sequential")
        assert model.plan.decoding.decode == "auto"

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"accept": "rejection"}, "belongs to draft mode"),
            ({"target": "draft", "remember": True}, "draft mode has none"),
            ({"decode": "lookahead", "remember": True}, "has none. Use auto"),
            ({"target": "local", "mbps": 10.0}, "there is no link"),
            ({"constant_shape": "8", "in_flight": 2}, "Leave out"),
            ({"defence": "random-cut:1-3"}, "Draw from 2 on"),
            ({"spacy_model": "en_core_web_sm"}, "finds names for --pseudonyms"),
            ({"cloud": "wss://127.0.0.1:1", "rtt_ms": 5.0}, "certificate"),
            ({"sessions": 0}, "must be at least 1"),
            ({"retries": -1}, "retries is -1"),
        ],
    )
    def test_settings_that_do_not_go_together(
        self, llama_folder: Path, settings: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(UserError, match=sentence):
            Aparte.connect(str(llama_folder), **NUMBERS, **settings)

    def test_what_is_learned_is_kept_by_whoever_wants_it(
        self, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("APARTE_CACHE", str(tmp_path))
        for remember in (False, True):
            with Aparte.connect(str(llama_folder), remember=remember, **NUMBERS) as model:
                first = model.generate(QUESTION, max_new_tokens=30)
            assert bool(list(memory_dir().glob("*.safetensors"))) is remember
        with Aparte.connect(str(llama_folder), remember=True, **NUMBERS) as model:
            again = model.generate(QUESTION, max_new_tokens=30)
        assert again.token_ids == first.token_ids
        assert again.round_trips < first.round_trips

    def test_a_table_that_cannot_be_kept_costs_no_answer(
        self, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("APARTE_CACHE", str(tmp_path / "file"))
        told: list[str] = []
        with Aparte.connect(str(llama_folder), remember=True, notice=told.append, **NUMBERS) as model:
            assert model.generate(QUESTION, **FEW).token_ids
        assert "leave --remember out" in told[-1]


class TestConversations:
    def test_part_by_part(self, model: Aparte) -> None:
        whole = model.chat(system="Be brief.", **FEW)
        first, second = whole.say(QUESTION), whole.say("And then?")
        chat = model.chat(system="Be brief.", **FEW)
        for question, answer in ((QUESTION, first), ("And then?", second)):
            with chat.stream(question) as stream:
                assert "".join(part.text for part in stream) == answer.text
        assert chat.messages == whole.messages
        chat.reset()
        assert chat.messages == [{"role": "system", "content": "Be brief."}]

    def test_what_was_said_stays_said(self, model: Aparte) -> None:
        chat = model.chat(max_new_tokens=40)
        with chat.stream(QUESTION) as stream:
            while not stream.written:
                next(stream)
        said = stream.written
        assert said
        assert stream.answer.finish_reason is None
        assert chat.messages[-1] == {"role": "assistant", "content": said}
        with chat.stream("And then?"):
            pass  # nothing came: the question was not asked
        assert len(chat.messages) == 2

    def test_a_long_prompt_tells_how_far_it_is(self, model: Aparte) -> None:
        told: list[tuple[int, int]] = []
        tokens = [token % 200 + 20 for token in range(300)]
        with model.stream(tokens, on_prefill=lambda *read: told.append(read), max_new_tokens=2) as stream:
            next(stream)
        assert told
        assert told == sorted(told)
        assert {total for _, total in told} == {told[-1][1]}


class TestPseudonyms:
    @pytest.fixture
    def names(self, model: Aparte, tmp_path: Path) -> tuple[Path, str, str]:
        """A list in which a word that the model is known to write stands for a name, and that word."""
        text = model.generate("the cat", **FEW).text
        parts = {text[at : at + size] for size in (2, 3, 4) for at in range(len(text) - size)}
        word = min(part for part in parts if part.isalnum() and restore(text, {part: "Kassandra"}) != text)
        file = tmp_path / "list.txt"
        file.write_text(f"Kassandra = {word}\nZoë = Lena\n", encoding="utf-8")
        return file, text, word

    def test_the_model_never_sees_a_name_and_the_user_no_stand_in(
        self, model: Aparte, llama_folder: Path, names: tuple[Path, str, str]
    ) -> None:
        file, text, word = names
        shown = restore(text, {word: "Kassandra"})
        asked = {**FEW, "stop": ["Kassandra, who is not there"]}  # which mentions the name
        told: list[str] = []
        with Aparte.connect(str(llama_folder), pseudonyms=file, notice=told.append, **NUMBERS) as hiding:
            assert "stand-ins for 2 listed names" in told[0]
            answer = hiding.generate("the cat", **asked)
            assert answer.text == shown
            with hiding.stream("the cat", **asked) as stream:
                assert "".join(part.text for part in stream) == shown
            assert stream.written == text
            assert stream.answer.to_json()["text"] == shown

            async def from_a_loop() -> tuple[str, str]:
                whole = await hiding.agenerate("the cat", **asked)
                return whole.text, "".join([part.text async for part in hiding.astream("the cat", **asked)])

            assert asyncio.run(from_a_loop()) == (shown, shown)
            raw = hiding.generate("Zoë and Zoë", raw=True, **FEW)
            assert raw.token_ids == model.generate("Lena and Lena", raw=True, **FEW).token_ids
            with hiding.stream("the cat", **asked) as left:
                next(left)
            assert left.answer.text == restore(left.written, {word: "Kassandra"})

    def test_a_conversation_keeps_its_stand_ins(
        self, llama_folder: Path, names: tuple[Path, str, str]
    ) -> None:
        with Aparte.connect(str(llama_folder), pseudonyms=names[0], **NUMBERS) as hiding:
            chat = hiding.chat(system="Zoë asks.", **FEW)
            first = chat.say("Zoë, 12345678")
            second = chat.say("Zoë again, 12345678")
            assert second.reused_tokens >= first.prompt_tokens
            seen = json.dumps(chat.messages, ensure_ascii=False)
            assert "Lena again" in seen
            assert "Zoë" not in seen
            assert "12345678" not in seen

    def test_what_cannot_be_searched_is_refused(
        self, llama_folder: Path, names: tuple[Path, str, str]
    ) -> None:
        with Aparte.connect(str(llama_folder), pseudonyms=names[0], **NUMBERS) as hiding:
            with pytest.raises(UserError, match="Give the prompt as text"):
                hiding.generate([20, 21, 22], **FEW)
            with pytest.raises(UserError, match="grammar"):
                hiding.generate("x", grammar='start: "a"', **FEW)
            with pytest.raises(UserError, match="not JSON"):
                hiding.generate("x", json_schema="{", **FEW)
            assert hiding.pool.busy == 0
