"""Tools: what templates are told, and calls in what a model writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aparte.gateway.tools import Call, ToolCalls
from gateway.served import NAME, connected, serving
from tiny import CHAT_TEMPLATE, save_tiny, tiny_tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ 'Answer with <tool_call>{...}</tool_call><|im_end|>' }}{% endif %}"
    + CHAT_TEMPLATE.replace(
        "message['content']",
        "message['content'] + (message['tool_calls'][0]['function']['arguments']['city'] "
        "if message['tool_calls'] else '')",
    )
)


def read(pieces: list[str]) -> tuple[str, list[Call]]:
    parser, text, calls = ToolCalls(), "", []
    for piece in pieces:
        outside, found = parser.feed(piece)
        text += outside
        calls += found
    return text + parser.finish(), calls


@given(st.lists(st.integers(0, len(f"Well. {CALL}\n{CALL}Done.")), max_size=8))
def test_calls_are_found_however_the_text_is_cut(cuts: list[int]) -> None:
    whole = f"Well. {CALL}\n{CALL}Done."
    places = [0, *sorted(cuts), len(whole)]
    text, calls = read([whole[a:b] for a, b in itertools.pairwise(places)])
    assert text == "Well. Done."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Łódź"})] * 2
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f"',
        "a < b <tool",
        f"<tool_call>{'[' * 20000}</tool_call>",
    ],
    ids=lambda text: text[:24],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read(list(text)) == (text, [])


def test_the_template_is_told_of_tools_and_calls(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tools")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    turns = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Ur"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]
    with connected(folder, None) as model, serving(model) as url:

        def ask(**more: object) -> httpx.Response:
            body = {"model": NAME, "messages": turns, "max_tokens": 3, "seed": 1, **more}
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)

        plain, told = ask().json(), ask(tools=[TOOL], tool_choice="auto").json()
        described = len(tokenizer(json.dumps(TOOL))["input_ids"])
        assert told["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + described // 2
        assert (
            ask(tools=[TOOL], tool_choice="none").json()["usage"]["prompt_tokens"]
            == plain["usage"]["prompt_tokens"]
        )
        turns[1]["tool_calls"][0]["function"]["arguments"] = "Ur"  # type: ignore[index]
        assert ask().json()["error"]["param"] == "messages[1].tool_calls"
