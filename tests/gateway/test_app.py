"""The API as the official client sees it: the same text as the commands write, and nothing ignored."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from aparte.gateway.app import PAGE_FILES
from cli.command import Command
from gateway.conftest import Served
from gateway.served import NAME, connected, serving, wait_for
from running import running_server
from tiny import tiny_model, tiny_tokenizer

QUESTION = "Why is the sky over the sea in the morning of another colour?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}


def post(served: Served, path: str = "chat/completions", **body: Any) -> httpx.Response:
    body = {"model": NAME, **({} if path == "completions" else {"messages": CHAT}), **body}
    return httpx.post(f"{served.url}/v1/{path}", json=body, timeout=30)


def ask(served: Served, **settings: Any) -> Any:
    return served.client.chat.completions.create(model=NAME, messages=CHAT, **settings)


class TestSameText:
    def test_as_generate_with_the_same_seed(
        self, served: Served, aparte: Command, llama_folder: Path
    ) -> None:
        options = ("--temperature", 0.9, "--seed", 7, "--max-new-tokens", 24, "--top-k", 40, "--min-p", 0.01)
        numbers = ("--dtype", "float32", "--wire", "float32", "--json")
        written = aparte("generate", llama_folder, QUESTION, "--cloud", served.cloud, *options, *numbers).json
        answer = ask(served, **SAMPLED, extra_body={"top_k": 40, "min_p": 0.01})
        choice = answer.choices[0]
        assert choice.message.content == written["text"]
        assert choice.finish_reason == written["finish_reason"]
        assert answer.usage.completion_tokens == written["new_tokens"]
        assert answer.usage.prompt_tokens == written["prompt_tokens"]

    def test_streamed_in_whole_and_from_async(self, served: Served) -> None:
        whole = ask(served, **SAMPLED)
        chunks = list(ask(served, **SAMPLED, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
        )
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        told = [c.choices[0].aparte for c in chunks[:-1] if "aparte" in (c.choices[0].model_extra or {})]
        assert [trip["round_trip"] for trip in told] == list(range(1, len(told) + 1))
        assert sum(trip["tokens"] for trip in told) == whole.usage.completion_tokens
        assert len(told) == chunks[-1].usage.aparte["round_trips"]
        assert whole.usage.aparte["parts"].keys() == chunks[-1].usage.aparte["parts"].keys()

        async def read() -> str:
            async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
                stream = await client.chat.completions.create(
                    model=NAME, messages=CHAT, stream=True, **SAMPLED
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert asyncio.run(read()) == whole.choices[0].message.content

    def test_without_usage_unless_asked(self, served: Served) -> None:
        chunks = list(ask(served, **GREEDY, stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)

    def test_several_choices_have_seeds_of_their_own(self, served: Served) -> None:
        answer = ask(served, **SAMPLED, n=3)
        texts = [choice.message.content for choice in answer.choices]
        alone = [ask(served, **SAMPLED | {"seed": 7 + number}) for number in range(3)]
        assert texts == [one.choices[0].message.content for one in alone]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
        assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens

    def test_stop_strings(self, served: Served) -> None:
        text = ask(served, **SAMPLED).choices[0].message.content
        stop = text[6:9]
        for given in (stop, [stop, "never written"]):
            answer = ask(served, **SAMPLED, stop=given)
            assert answer.choices[0].message.content == text[: text.index(stop)]
            assert answer.choices[0].finish_reason == "stop"

    def test_completions(self, served: Served) -> None:
        prompts = ["the sea and", "of the in"]
        tokens = [tiny_tokenizer()(prompt)["input_ids"] for prompt in prompts]
        both = served.client.completions.create(model=NAME, prompt=prompts, **GREEDY)
        by_id = served.client.completions.create(model=NAME, prompt=tokens, **GREEDY)
        assert [choice.text for choice in both.choices] == [choice.text for choice in by_id.choices]
        raw = served.model.generate(prompts[1], raw=True, max_new_tokens=20)
        assert both.choices[1].text == raw.text
        chunks = list(served.client.completions.create(model=NAME, prompt=prompts[1], stream=True, **GREEDY))
        assert "".join(chunk.choices[0].text for chunk in chunks) == raw.text
        assert served.client.completions.create(
            model=NAME, prompt=prompts[0], temperature=0
        ).usage.completion_tokens in range(1, 17)


class TestLogits:
    """What depends on logits is right at every position, also where tokens were drafted."""

    @pytest.fixture(scope="class")
    def served(self, llama_folder: Path, served: Served) -> Iterator[Served]:
        """The same cloud, with a number of nodes that does not go by the clock."""
        with (
            connected(llama_folder, served.cloud, max_nodes=8) as model,
            serving(model) as url,
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield replace(served, url=url, model=model, client=client)

    @pytest.fixture
    def reference(self) -> Any:
        return tiny_model("llama")

    def prompt(self, served: Served) -> list[int]:
        return served.model.encode(CHAT)

    def logits(self, reference: Any, tokens: list[int]) -> torch.Tensor:
        rows: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
        return rows

    def test_logprobs(self, served: Served, reference: Any) -> None:
        answer = ask(served, **SAMPLED, logprobs=True, top_logprobs=3)
        written = served.model.generate(CHAT, temperature=0.9, seed=7, max_new_tokens=24)
        assert written.mat > 1, "some tokens were drafted"
        prompt = self.prompt(served)
        rows = self.logits(reference, prompt + written.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
        told = answer.choices[0].logprobs.content
        assert len(told) == len(written.token_ids) == answer.usage.completion_tokens
        for entry, token, row in zip(told, written.token_ids, rows, strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
            best = row.topk(3).values.tolist()
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-3)
        chunks = ask(served, **SAMPLED, logprobs=True, stream=True)
        streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
        assert [entry.token for entry in streamed] == [entry.token for entry in told]

    def test_logprobs_of_completions(self, served: Served) -> None:
        answer = served.client.completions.create(model=NAME, prompt="the sea", logprobs=2, **GREEDY)
        told = answer.choices[0].logprobs
        assert len(told.tokens) == answer.usage.completion_tokens
        assert all(len(top) == 2 for top in told.top_logprobs)
        assert max(told.top_logprobs[0].values()) == told.token_logprobs[0], "greedy takes the best"

    @pytest.mark.parametrize(
        ("frequency", "presence", "bias"),
        [(1.5, 0.0, {}), (0.0, 2.0, {}), (0.7, -0.5, {"40": 6, "41": -100})],
    )
    def test_penalties_are_those_of_decoding_token_by_token(
        self, served: Served, reference: Any, frequency: float, presence: float, bias: dict[str, float]
    ) -> None:
        settings = {"frequency_penalty": frequency, "presence_penalty": presence, "logit_bias": bias}
        answer = served.client.chat.completions.create(
            model=NAME, messages=CHAT, temperature=0, max_tokens=30, **settings
        )
        tokens, written = self.prompt(served), []
        for _ in range(30):
            row = self.logits(reference, tokens + written)[-1]
            for token in set(written):
                row[token] -= frequency * written.count(token) + presence
            for name, value in bias.items():
                row[int(name)] += value
            written.append(int(row.argmax()))
            if written[-1] in served.model.codec.eos:
                break
        assert answer.choices[0].message.content == served.model.codec.decode(written)
        assert answer.usage.completion_tokens == len(written)

    def test_a_schema_is_followed_also_by_drafts(self, served: Served) -> None:
        pytest.importorskip("llguidance", reason="llguidance is not installed")
        schema = {
            "type": "object",
            "properties": {"sky": {"enum": ["blue", "grey"]}, "sure": {"type": "boolean"}},
            "required": ["sky", "sure"],
            "additionalProperties": False,
        }
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
        settings = {"temperature": 0.5, "seed": 3, "max_tokens": 80, "response_format": wanted}
        answer = ask(served, **settings)
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"sky", "sure"}
        assert found["sky"] in ("blue", "grey")
        assert answer.choices[0].finish_reason == "stop"
        assert ask(served, **settings).choices[0].message.content == answer.choices[0].message.content


class TestSessions:
    def test_a_follow_up_sends_only_what_is_new(self, served: Served) -> None:
        first = ask(served, **GREEDY)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        turns = [*CHAT, said, {"role": "user", "content": "And then?"}]
        second = served.client.chat.completions.create(model=NAME, messages=turns, **GREEDY)
        held = second.usage.prompt_tokens_details.cached_tokens
        assert held >= first.usage.prompt_tokens
        revealed = second.usage.aparte["revealed"]
        assert revealed["kind"] == "hidden_states"
        assert revealed["after_layer"] == 2
        assert revealed["positions"] >= second.usage.prompt_tokens - held + second.usage.completion_tokens - 1

    def test_answers_at_the_same_time_are_those_of_one_at_a_time(self, served: Served) -> None:
        asked = [[{"role": "user", "content": f"{number} {QUESTION}"}] for number in range(6)]

        def answer(messages: Any) -> Any:
            return served.client.chat.completions.create(model=NAME, messages=messages, **SAMPLED)

        alone = [answer(messages).choices[0].message.content for messages in asked]
        with ThreadPoolExecutor(6) as threads:
            together = [one.choices[0].message.content for one in threads.map(answer, asked)]
        assert together == alone
        assert served.server.session_count <= 3
        wait_for(lambda: served.model.pool.busy == 0)

    @pytest.mark.parametrize("stream", [True, False])
    def test_when_the_client_leaves_the_cloud_stops_within_a_step(
        self, llama_folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        with (
            running_server(llama_folder) as (server, cloud),
            connected(llama_folder, cloud, sessions=1, decode="sequential") as model,
            serving(model) as url,
        ):
            compute = server.engine.run_pass

            def slowly(shares: Any) -> Any:
                import time

                time.sleep(0.03)
                return compute(shares)

            monkeypatch.setattr(server.engine, "run_pass", slowly)
            body = {"model": NAME, "messages": CHAT, "stream": stream, "temperature": 0, "max_tokens": 300}
            # Nothing in here ends an answer early.
            body["logit_bias"] = {str(token): -100 for token in model.codec.eos}
            before = server.counters.steps
            if stream:
                with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
                    lines = reply.iter_lines()
                    while "round_trip" not in next(lines):
                        pass
            else:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.3)
            at_leaving = server.counters.steps
            wait_for(lambda: model.pool.busy == 0)
            assert before < server.counters.steps <= at_leaving + 2
            # The session is in order: it goes on with what it holds.
            again = httpx.post(f"{url}/v1/chat/completions", json=body | {"stream": False, "max_tokens": 3})
            assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    def test_long_prompts_are_read_with_signs_of_life(
        self, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            running_server(llama_folder) as (server, cloud),
            connected(llama_folder, cloud) as model,
            serving(model, keep_alive_s=0.05) as url,
        ):
            compute = server.engine.run_pass

            def slowly(shares: Any) -> Any:
                import time

                time.sleep(0.2)
                return compute(shares)

            monkeypatch.setattr(server.engine, "run_pass", slowly)
            body = {"model": NAME, "prompt": list(range(20, 220)) * 2, "stream": True, "max_tokens": 2}
            lines = httpx.post(f"{url}/v1/completions", json=body, timeout=30).text.split("\n\n")
            assert ": keep-alive" in lines
            assert any(line.startswith(": reading the prompt, ") for line in lines)
            assert lines[-2:] == ["data: [DONE]", ""]


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"frequency": 1}, "frequency"),
            ({"audio": {"voice": "x"}}, "audio"),
            ({"functions": []}, "functions"),
            ({"temperature": 2.5}, "temperature"),
            ({"temperature": "1"}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"n": 0}, "n"),
            ({"n": 100}, "n"),
            ({"stop": [""]}, "stop"),
            ({"seed": -1}, "seed"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"999999": 1}}, "logit_bias"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"response_format": {"type": "grammar"}}, "response_format.type"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0]"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
                "messages[0].content",
            ),
            ({"messages": [{"role": "user", "content": "x", "name": "ann"}]}, "messages[0].name"),
            ({"messages": [{"role": "user", "content": "the sea " * 400}]}, "messages"),
        ],
        ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
    )
    def test_what_cannot_be_had_is_named(self, served: Served, body: dict[str, Any], param: str) -> None:
        reply = post(served, **body)
        error = reply.json()["error"]
        assert reply.status_code == 400, error
        assert (error["param"] or "").startswith(param), error
        assert param.split("[")[0] in error["message"] or "context" in error["message"]
        assert error["type"] == "invalid_request_error"

    @pytest.mark.parametrize("body", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"logprobs": 6}])
    def test_in_completions_too(self, served: Served, body: dict[str, Any]) -> None:
        reply = post(served, "completions", prompt="x", **body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == next(iter(body))

    @pytest.mark.parametrize("prompt", ["", [], [[]], [10**6], [-1]])
    def test_prompts_that_are_none(self, served: Served, prompt: Any) -> None:
        assert post(served, "completions", prompt=prompt).status_code == 400

    def test_a_schema_that_is_none(self, served: Served) -> None:
        pytest.importorskip("llguidance", reason="llguidance is not installed")
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        reply = post(served, response_format=schema)
        assert reply.status_code == 400
        assert "JSON schema" in reply.json()["error"]["message"]

    def test_what_is_no_json(self, served: Served) -> None:
        half = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
        for content in (b"{", b"[" * 100_000, b'{"model": "\xff"}', half):
            headers = {"content-type": "application/json"}
            reply = httpx.post(f"{served.url}/v1/chat/completions", content=content, headers=headers)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"]

    def test_the_client_gets_its_own_exceptions(self, served: Served) -> None:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            ask(served, temperature=9)
        with pytest.raises(openai.NotFoundError, match="--alias"):
            served.client.chat.completions.create(model="gpt-5", messages=CHAT)
        with pytest.raises(openai.NotFoundError):
            served.client.embeddings.create(model=NAME, input="x")

    def test_a_cloud_that_is_gone(self, llama_folder: Path) -> None:
        with running_server(llama_folder) as (_, cloud):
            model = connected(llama_folder, cloud)
            ready = model.__enter__()
            ready.generate(CHAT, max_new_tokens=2)
        object.__setattr__(ready.connection.link, "retries", 0)
        with serving(ready) as url:
            for stream in (False, True):
                body = {"model": NAME, "messages": CHAT, "stream": stream}
                reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
                assert reply.status_code == 503
                assert reply.json()["error"]["code"] == "cloud_unreachable"
        model.__exit__(None, None, None)

    def test_no_message_repeats_text(self, served: Served) -> None:
        secret = "zanzibar"
        replies = [
            post(served, messages=[{"role": "user", "content": secret, "name": secret}]),
            post(served, stop=[secret, ""]),
            post(served, messages=[{"role": "user", "content": f"{secret} " * 500}]),
            post(served, "completions", prompt={"text": secret}),
        ]
        assert [reply.status_code for reply in replies] == [400] * 4
        assert not any(secret in reply.text for reply in replies)


class TestAround:
    def test_models(self, served: Served) -> None:
        listed = served.client.models.list().data
        assert [model.id for model in listed] == [NAME, "gpt-4o"]
        assert served.client.models.retrieve(NAME).aparte["cloud_sees_text"] is False
        by_alias = served.client.chat.completions.create(model="gpt-4o", messages=CHAT, **GREEDY)
        assert by_alias.choices[0].message.content == ask(served, **GREEDY).choices[0].message.content

    def test_health_and_numbers(self, served: Served) -> None:
        assert httpx.get(f"{served.url}/health").json()["status"] == "ok"

        def written() -> float:
            lines = httpx.get(f"{served.url}/metrics").text.splitlines()
            name = "aparte_gateway_completion_tokens_total "
            return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))

        before = written()
        tokens = ask(served, **GREEDY).usage.completion_tokens
        assert written() == before + tokens

    def test_the_page_asks_nobody_else(self, served: Served) -> None:
        page = httpx.get(f"{served.url}/")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert "unsafe" not in page.headers["content-security-policy"]
        files = [httpx.get(f"{served.url}/static/{name}") for name in PAGE_FILES]
        assert all(file.status_code == 200 for file in files)
        for text in (page.text, *(file.text for file in files)):
            assert not re.search(r"//\w", text.replace("http://www.w3.org/2000/svg", ""))
            assert not re.search(r"\.(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(", text)
        assert httpx.get(f"{served.url}/static/..%2Fapp.py").status_code == 404


@pytest.fixture(scope="module")
def drafting(llama_folder: Path) -> Any:
    with (
        running_server(llama_folder, whole=True) as (server, cloud),
        connected(llama_folder, cloud, target="draft") as model,
        serving(model) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(url, model, server, cloud, client)


class TestDraftMode:
    def test_the_same_text_and_the_truth_about_it(self, served: Served, drafting: Served) -> None:
        for settings in (GREEDY, SAMPLED):
            answer = ask(drafting, **settings)
            assert answer.choices[0].message.content == ask(served, **settings).choices[0].message.content
            assert answer.usage.aparte["revealed"]["kind"] == "tokens"
        assert drafting.client.models.retrieve(NAME).aparte["cloud_sees_text"] is True

    @pytest.mark.parametrize(
        "body",
        [
            {"logprobs": True},
            {"frequency_penalty": 1.0},
            {"presence_penalty": -1.0},
            {"logit_bias": {"5": 1.0}},
            {"response_format": {"type": "json_object"}},
        ],
    )
    def test_what_needs_logits_is_named(self, drafting: Served, body: dict[str, Any]) -> None:
        error = post(drafting, **body).json()["error"]
        assert error["param"] == next(iter(body))
        assert "draft mode" in error["message"]
