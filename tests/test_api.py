"""The library: the same answers as the commands, from several threads and from an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aparte import Aparte, Options
from aparte.cloud.certificate import own_certificate
from aparte.cloud.door import pin_of, tls_context
from aparte.cloud.server import MiddleServer
from aparte.errors import DoorError, UserError
from cli.command import Command
from running import running_server

QUESTION = "Why is the sky over the sea of another colour?"
NUMBERS = {"dtype": "float32", "device": "cpu", "wire": "float32"}


@pytest.fixture(scope="module")
def cloud(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    with running_server(llama_folder) as running:
        yield running


@pytest.fixture(scope="module")
def model(llama_folder: Path, cloud: tuple[MiddleServer, str]) -> Iterator[Aparte]:
    with Aparte.connect(str(llama_folder), cloud=cloud[1], sessions=2, **NUMBERS) as model:
        yield model


class TestAnswers:
    def test_are_those_of_the_command(self, model: Aparte, aparte: Command, llama_folder: Path) -> None:
        options = ("--temperature", 0.8, "--seed", 3, "--max-new-tokens", 16)
        written = aparte("generate", llama_folder, QUESTION, *options, "--dtype", "float32", "--json").json
        answer = model.generate(QUESTION, temperature=0.8, seed=3, max_new_tokens=16)
        assert answer.token_ids == written["token_ids"]
        assert answer.text == written["text"]
        assert answer.target == "split"

    def test_come_part_by_part(self, model: Aparte) -> None:
        whole = model.generate(QUESTION, max_new_tokens=16)
        with model.stream(QUESTION, max_new_tokens=16) as stream:
            assert "".join(part.text for part in stream) == whole.text
        assert stream.answer.finish_reason == whole.finish_reason

    def test_without_blocking_an_event_loop(self, model: Aparte) -> None:
        async def both() -> tuple[str, str]:
            answer = await model.agenerate(QUESTION, max_new_tokens=16)
            return answer.text, "".join(
                [part.text async for part in model.astream(QUESTION, max_new_tokens=16)]
            )

        text = model.generate(QUESTION, max_new_tokens=16).text
        assert asyncio.run(both()) == (text, text)

    @pytest.mark.parametrize("target", ["local", "draft", "split"])
    def test_wherever_the_model_is(self, model: Aparte, llama_folder: Path, target: str) -> None:
        with Aparte.connect(str(llama_folder), target=target, **NUMBERS) as other:
            for options in ({}, {"temperature": 0.7, "seed": 5}):
                theirs = other.generate(QUESTION, max_new_tokens=12, **options)
                assert theirs.text == model.generate(QUESTION, max_new_tokens=12, **options).text

    def test_behind_a_door_of_its_own(self, model: Aparte, llama_folder: Path, tmp_path: Path) -> None:
        path, _ = own_certificate(tmp_path)
        asked = {"max_new_tokens": 8}
        with running_server(llama_folder, tls=tls_context(path, path), token="open-sesame") as (_, url):
            reach = {"cloud": url, "token": "open-sesame", "sessions": 1, **NUMBERS}
            with Aparte.connect(str(llama_folder), pins=[pin_of(path)], **reach) as other:  # type: ignore[arg-type]
                assert other.generate(QUESTION, **asked).text == model.generate(QUESTION, **asked).text
            with pytest.raises(DoorError):
                Aparte.connect(str(llama_folder), pins=["sha256:" + "0" * 64], **reach)  # type: ignore[arg-type]

    def test_a_conversation_is_found_again(self, model: Aparte) -> None:
        chat = model.chat(system="Be brief.", max_new_tokens=8)
        first = chat.say(QUESTION)
        second = chat.say("And then?", max_new_tokens=5)
        assert second.reused_tokens >= first.prompt_tokens
        assert len(second.token_ids) <= 5
        assert [turn["role"] for turn in chat.messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]

    def test_from_several_threads(self, model: Aparte, cloud: tuple[MiddleServer, str]) -> None:
        questions = [f"{number} {QUESTION}" for number in range(5)]
        alone = [model.generate(question, max_new_tokens=12).text for question in questions]
        with ThreadPoolExecutor(5) as threads:
            together = threads.map(
                lambda question: model.generate(question, max_new_tokens=12).text, questions
            )
            assert list(together) == alone
        assert cloud[0].session_count <= 2


class TestEnds:
    def test_leaving_early_leaves_a_session_in_order(self, model: Aparte) -> None:
        whole = model.generate(QUESTION, max_new_tokens=30)
        with model.stream(QUESTION, max_new_tokens=30) as stream:
            next(stream)
        assert model.pool.busy == 0
        assert model.generate(QUESTION, max_new_tokens=30).token_ids == whole.token_ids

    def test_a_task_that_is_cancelled_gives_its_session_back(self, model: Aparte) -> None:
        async def start_and_leave() -> None:
            task = asyncio.ensure_future(model.agenerate(QUESTION, max_new_tokens=400))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while model.pool.busy:
                await asyncio.sleep(0.01)

        asyncio.run(start_and_leave())

    def test_closing_ends_its_sessions(self, llama_folder: Path, cloud: tuple[MiddleServer, str]) -> None:
        before, threads = cloud[0].session_count, threading.active_count()
        with Aparte.connect(str(llama_folder), cloud=cloud[1], **NUMBERS) as model:
            model.generate(QUESTION, max_new_tokens=2)
            assert cloud[0].session_count == before + 1
        for _ in range(200):
            if cloud[0].session_count == before and threading.active_count() <= threads:
                break
            threading.Event().wait(0.02)
        assert cloud[0].session_count == before


class TestMistakes:
    def test_in_options(self, model: Aparte) -> None:
        with pytest.raises(UserError, match="There is no option temprature"):
            model.generate(QUESTION, temprature=1)
        with pytest.raises(UserError, match="temperature is -1"):
            model.generate(QUESTION, temperature=-1)
        with pytest.raises(UserError, match="top_logprobs"):
            Options(top_logprobs=99)
        with pytest.raises(UserError, match="logit_bias"):
            model.generate(QUESTION, logit_bias={10**6: 1.0})
        assert model.pool.busy == 0

    def test_draft_mode_has_no_logits(self, llama_folder: Path) -> None:
        with (
            Aparte.connect(str(llama_folder), target="draft", **NUMBERS) as model,
            pytest.raises(UserError, match="draft mode"),
        ):
            model.generate(QUESTION, frequency_penalty=1.0)

    def test_without_a_cloud_there(self, llama_folder: Path) -> None:
        from aparte.errors import LinkError

        with pytest.raises(LinkError):
            Aparte.connect(str(llama_folder), cloud="ws://127.0.0.1:9", **NUMBERS)


def test_the_name_costs_nothing_until_it_is_used() -> None:
    code = (
        "import sys, aparte; assert 'torch' not in sys.modules; aparte.Aparte; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "True"
    with pytest.raises(AttributeError, match="nonsense"):
        __import__("aparte").nonsense  # noqa: B018
