"""Several choices of one request: at the same time, with the text of one after the other."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from aparte.cloud.server import MiddleServer
from gateway.conftest import Served
from gateway.served import NAME, connected, serving, wait_for
from relay import Break, relay_to
from running import running_server

CHAT: list[Any] = [{"role": "user", "content": "Why is the sky over the sea of another colour?"}]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 16}


def slowly(server: MiddleServer, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Have every pass of the cloud take so long."""
    compute = server.engine.run_pass

    def run(shares: Any) -> Any:
        time.sleep(seconds)
        return compute(shares)

    monkeypatch.setattr(server.engine, "run_pass", run)


def ask(client: openai.OpenAI, **settings: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=CHAT, **SAMPLED | settings)


class TestStreams:
    def test_chunks_come_as_they_are_written(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        alone = [ask(served.client, seed=7 + number) for number in range(4)]
        slowly(served.server, monkeypatch)
        busy = 0
        texts: dict[int, str] = defaultdict(str)
        order: list[int] = []
        ends: dict[int, str] = {}
        usage: Any = None
        for chunk in ask(served.client, n=4, stream=True, stream_options={"include_usage": True}):
            busy = max(busy, served.model.pool.busy)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert choice.index not in ends, "nothing comes after the end"
                assert (choice.delta.role == "assistant") is (choice.index not in order)
                order.append(choice.index)
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
        assert [texts[index] for index in range(4)] == [one.choices[0].message.content for one in alone]
        assert ends == {index: one.choices[0].finish_reason for index, one in enumerate(alone)}
        assert busy == 3, "as many as there are sessions"
        changes = sum(one != other for one, other in pairwise(order))
        assert changes > 6, "their chunks are between each other"
        assert usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
        assert usage.prompt_tokens == alone[0].usage.prompt_tokens
        assert usage.aparte["round_trips"] > 0

    def test_a_list_of_prompts_and_the_order_of_choices(self, served: Served) -> None:
        prompts = ["the sea and", "of the in", "a b c"]
        together = served.client.completions.create(model=NAME, prompt=prompts, n=2, **SAMPLED)
        assert [choice.index for choice in together.choices] == list(range(6))
        for number, prompt in enumerate(prompts):
            alone = served.client.completions.create(model=NAME, prompt=prompt, n=2, **SAMPLED)
            both = together.choices[2 * number : 2 * number + 2]
            assert [choice.text for choice in both] == [choice.text for choice in alone.choices]

    def test_one_session_writes_them_in_turn(self, served: Served, llama_folder: Path) -> None:
        expected = [choice.message.content for choice in ask(served.client, n=3).choices]
        with (
            connected(llama_folder, served.cloud, sessions=1) as model,
            serving(model) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            answer = ask(client, n=3)
            order = [c.index for chunk in ask(client, n=3, stream=True) for c in chunk.choices]
        assert [choice.message.content for choice in answer.choices] == expected
        assert order == sorted(order)

    def test_others_get_their_turn(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        """A request with more choices than there are sessions does not hold up the next one until its end."""
        slowly(served.server, monkeypatch)
        with served.client.chat.completions.create(
            model=NAME, messages=CHAT, n=12, stream=True, **SAMPLED
        ) as stream:
            next(iter(stream))
            before = time.monotonic()
            ask(served.client, max_tokens=2)
            waited = time.monotonic() - before
            ended = {choice.index for chunk in stream for choice in chunk.choices if choice.finish_reason}
        assert len(ended) >= 12 - 6, "most were still to come"
        assert waited < 20 * 0.5


class TestEnds:
    def test_when_the_client_leaves_all_of_them_end(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slowly(served.server, monkeypatch)
        bias = {str(token): -100 for token in served.model.codec.eos}
        body = {"model": NAME, "messages": CHAT, "stream": True, "n": 3, **SAMPLED, "max_tokens": 300}
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=body | {"logit_bias": bias}
        ) as reply:
            seen = set()
            for line in reply.iter_lines():
                seen |= {index for index in range(3) if f'"index": {index}' in line and "round_trip" in line}
                if len(seen) == 3:
                    break
        at_leaving = served.server.counters.steps
        wait_for(lambda: served.model.pool.busy == 0)
        assert served.server.counters.steps <= at_leaving + 2 * 3
        time.sleep(0.1)
        assert served.model.pool.waiting == 0
        steps = served.server.counters.steps
        time.sleep(0.1)
        assert served.server.counters.steps == steps

    @pytest.mark.parametrize("stream", [True, False])
    def test_an_error_in_one_ends_all(
        self, llama_folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        with (
            running_server(llama_folder) as (server, cloud),
            # The second session's connection ends in the middle of its answer, the first one's never.
            relay_to(cloud, (Break(), Break(down=12_000))) as relay,
            connected(llama_folder, relay.url, sessions=2, retries=0) as model,
            serving(model) as url,
        ):
            slowly(server, monkeypatch)
            bias = {str(token): -100 for token in model.codec.eos}
            body = {"model": NAME, "messages": CHAT, "n": 2, **SAMPLED, "max_tokens": 400}
            reply = httpx.post(
                f"{url}/v1/chat/completions", json=body | {"logit_bias": bias, "stream": stream}, timeout=60
            )
            if stream:
                events = [line for line in reply.text.split("\n\n") if line.startswith("data:")]
                assert ['"error"' in event for event in events] == [False] * (len(events) - 1) + [True]
                assert {index for index in range(2) for event in events if f'"index": {index}' in event} == {
                    0,
                    1,
                }
                assert '"finish_reason": "' not in reply.text, "none had come to its end"
            else:
                assert reply.status_code in (502, 503)
                assert reply.json()["error"]["code"].startswith("cloud")
            wait_for(lambda: model.pool.busy == 0)
            steps = server.counters.steps
            time.sleep(0.1)
            assert server.counters.steps == steps
