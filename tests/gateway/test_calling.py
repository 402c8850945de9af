"""What a request demands of tool calls: as a grammar, and in what a model writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from aparte.errors import UserError
from aparte.gateway.calling import calling
from aparte.gateway.problems import ApiError
from aparte.gateway.requests import ChatRequest
from aparte.grammar import Grammars
from gateway.served import NAME, connected, serving
from gateway.test_tools import TEMPLATE
from running import running_server
from tiny import save_tiny, tiny_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")

CITY = {"type": "object", "properties": {"city": {"enum": ["Ur", "Uruk"]}}, "required": ["city"]}
CITY["additionalProperties"] = False  # type: ignore[assignment]
NEVER = '{"city": "Rome"}'


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}
    return {"type": "function", "function": function}


def request(**fields: Any) -> ChatRequest:
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], **fields}
    return ChatRequest.model_validate_json(json.dumps(body))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("tools") / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def accepts(folder: Path) -> Callable[[str, str], bool]:
    """Whether a grammar lets a whole text pass, and an answer end there."""
    tokenizer = tiny_tokenizer()
    grammars = Grammars(folder, len(tokenizer), frozenset([tokenizer.eos_token_id]))

    def accepts(grammar: str, text: str) -> bool:
        constraint = grammars.lark(grammar)
        tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        logits = torch.zeros(len(tokenizer))
        return all(constraint(tokens[:n], logits)[token] == 0 for n, token in enumerate(tokens))

    return accepts


UR, ROME, PING = call("city", '{"city": "Ur"}'), call("city", NEVER), call("ping", "{}")
BOTH = [tool("city", CITY), tool("ping")]
STRICT = [tool("city", CITY, strict=True), tool("ping")]
NAMED = {"type": "function", "function": {"name": "city"}}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"tools": BOTH, "tool_choice": "required"},
            [UR, PING, f"{UR}\n{PING}"],
            [
                "",
                "Well.",
                ROME,
                call("city", '{  "city":"Ur"}'),
                f"Well. {UR}",
                f"{UR} Done.",
                call("ping", '{"x": 1}'),
            ],
        ),
        (
            {"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False},
            [UR, PING],
            [f"{UR}\n{PING}", "Well."],
        ),
        ({"tools": BOTH, "tool_choice": NAMED}, [UR], [PING, ROME, f"{UR}\n{UR}", ""]),
        (
            {"tools": STRICT},
            [
                "",
                "Well.",
                "a < b <tool",
                UR,
                f"Well. {UR} And {PING}.",
                call("ping", '{"any": [1, 2], "b": {}}'),
            ],
            [ROME, f"Well. {ROME}", "<tool_call>x", call("other", "{}")],
        ),
        (
            {"tools": BOTH, "parallel_tool_calls": False},
            ["Well.", f"Well. {PING}", ROME],
            [f"{UR}\n{PING}", "<tool_call>"],
        ),
    ],
    ids=["required", "one", "named", "strict", "not-parallel"],
)
def test_grammars(
    accepts: Callable[[str, str], bool], fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammar = calling(request(**fields)).grammar
    assert grammar is not None
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": BOTH},
        {"tools": BOTH, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": BOTH, "tool_choice": "none", "parallel_tool_calls": False},
    ],
)
def test_what_the_model_does_by_itself_needs_none(fields: dict[str, Any]) -> None:
    assert calling(request(**fields)).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [tool("ping")]}, "tool_choice"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [tool("a", {"type": "string"})]}, "tools[0].function.parameters"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        calling(request(**fields))
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_grammar_that_is_none(folder: Path) -> None:
    grammars = Grammars(folder, len(tiny_tokenizer()), frozenset([1]))
    with pytest.raises(UserError, match="grammar cannot be used"):
        grammars.lark("start: nowhere")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with (
        running_server(folder) as (_, cloud),
        connected(folder, cloud) as model,
        serving(model) as url,
    ):
        yield url


class TestWritten:
    def ask(self, url: str, **more: Any) -> httpx.Response:
        body = {"model": NAME, "messages": [{"role": "user", "content": "Rain?"}], "max_tokens": 120, **more}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)

    @pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
    def test_a_call_that_was_demanded(self, url: str, choice: Any) -> None:
        for seed in range(2):
            settings = {"tools": BOTH[:1], "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
            answer = self.ask(url, **settings).json()["choices"][0]
            (made,) = answer["message"]["tool_calls"]
            assert made["function"]["name"] == "city"
            assert json.loads(made["function"]["arguments"])["city"] in ("Ur", "Uruk")
            assert answer["message"]["content"] is None
            assert answer["finish_reason"] == "tool_calls"
            assert (
                self.ask(url, **settings).json()["choices"][0]["message"]["tool_calls"][0]["function"]
                == made["function"]
            ), "the same seed, the same call"

    def test_streamed(self, url: str) -> None:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "Rain?"}],
            "tools": BOTH,
            "tool_choice": NAMED,
            "stream": True,
            "max_tokens": 120,
        }
        text = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).text
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        calls = [one for c in chunks for one in c["choices"][0]["delta"].get("tool_calls", [])]
        assert [one["index"] for one in calls] == [0]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    def test_a_choice_of_an_unknown_kind_is_named(self, url: str) -> None:
        for choice in ("sometimes", {"type": "allowed_tools"}, {"type": "function"}, 3):
            error = self.ask(url, tools=BOTH, tool_choice=choice).json()["error"]
            assert error["param"].startswith("tool_choice")


def test_in_draft_mode_a_demand_is_refused_by_name(folder: Path) -> None:
    with (
        running_server(folder, whole=True) as (_, cloud),
        connected(folder, cloud, target="draft") as model,
        serving(model) as url,
    ):
        for fields, param in (
            ({"tool_choice": "required", "tools": BOTH}, "tool_choice"),
            ({"parallel_tool_calls": False, "tools": BOTH}, "parallel_tool_calls"),
            ({"tools": STRICT}, "tools[0].function.strict"),
        ):
            reply = TestWritten().ask(url, **fields)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param
        assert TestWritten().ask(url, tools=BOTH).status_code == 200
