"""Pseudonyms at the gateway: the model never sees a name, clients never see a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aparte.api import Aparte
from aparte.errors import UserError
from aparte.gateway.hiding import Hiding, beginning, hide_message, hide_tool, restored
from aparte.gateway.requests import ChatRequest
from aparte.gateway.tools import Call
from aparte.gateway.translate import order_chat
from aparte.privacy.finders import Listed, find_patterns
from aparte.privacy.structured import hide_schema
from gateway.conftest import Served
from gateway.served import NAME, connected, serving
from gateway.test_calling import tool
from running import running_server

NAMES = (Listed("Elvira Quist", "Clara Doe"), Listed("Zaandam"))
SECRETS = ("Elvira", "Quist", "Zaandam", "20481632")


@pytest.fixture
def hiding() -> Hiding:
    return Hiding(NAMES, [find_patterns])


def chat(*texts: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)
    ]


def hidden(hiding: Hiding, turns: list[dict[str, Any]]) -> list[str]:
    names = hiding.conversation(beginning(turns))
    return [hide_message(turn, names.hide)["content"] for turn in turns]


class TestConversations:
    def test_go_on_with_the_stand_ins_that_they_began_with(self, hiding: Hiding) -> None:
        turns = chat("Elvira Quist lives in Zaandam.", "Does she?", "Her account is 20481632.")
        first, longer = hidden(hiding, turns[:1]), hidden(hiding, turns)
        assert longer[:1] == first
        assert not any(secret in text for secret in SECRETS for text in longer)
        assert hidden(hiding, turns) == longer

    def test_do_not_share_them(self, hiding: Hiding) -> None:
        found = {hidden(hiding, chat(f"Zaandam, {number}"))[0].split(",")[0] for number in range(6)}
        assert len(found) > 1
        assert hidden(hiding, chat("Zaandam")) == hidden(hiding, chat("Zaandam"))

    def test_of_another_process_neither(self, hiding: Hiding) -> None:
        mine = [hidden(hiding, chat(f"{number} 20481632"))[0] for number in range(4)]
        other = Hiding(NAMES, [find_patterns])
        assert mine != [hidden(other, chat(f"{number} 20481632"))[0] for number in range(4)]

    def test_begin_with_their_first_question(self) -> None:
        turns = [{"role": "system", "content": "s"}, *chat("a", "b", "c")]
        assert beginning(turns) == ["s", "a"]
        assert beginning(turns[:1]) == ["s"]

    def test_a_list_that_contradicts_itself_is_refused_at_once(self) -> None:
        with pytest.raises(UserError, match="share a word"):
            Hiding((Listed("A B", "Cee Dee"), Listed("E F", "Cee Eff")), [])


class TestTools:
    def test_descriptions_and_values_are_text_and_names_are_not(self, hiding: Hiding) -> None:
        names = hiding.conversation(["x"])
        given = tool(
            "Zaandam",
            {
                "type": "object",
                "title": "Zaandam",
                "properties": {
                    "name": {"type": "string", "enum": ["Elvira Quist"], "default": {"type": "Zaandam"}},
                    "type": {"type": ["string", "null"], "pattern": "Zaandam"},
                },
                "required": ["name"],
            },
            description="Where Elvira Quist is.",
        )
        told = hide_tool(given, names.hide)["function"]
        assert told["name"] == "Zaandam"
        assert told["parameters"]["required"] == ["name"]
        assert told["parameters"]["properties"]["type"]["type"] == ["string", "null"]
        assert told["parameters"]["properties"]["name"]["enum"] == ["Clara Doe"]
        told.pop("name")
        assert "Zaandam" not in json.dumps(told)
        assert "Elvira" not in json.dumps(told)

    def test_arguments_come_back(self, hiding: Hiding) -> None:
        names = hiding.conversation(["x"])
        names.hide("Elvira Quist")
        call = Call("1", "f", '{"who": ["Clara Doe", 3], "Clara Doe": null}')
        assert json.loads(restored(call, names.restorer).arguments) == {
            "who": ["Elvira Quist", 3],
            "Clara Doe": None,
        }

    def test_calls_of_earlier_turns_are_hidden(self, hiding: Hiding) -> None:
        names = hiding.conversation(["x"])
        function = {"name": "f", "arguments": {"who": "Elvira Quist"}}
        turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
        assert "Clara Doe" in json.dumps(hide_message(turn, names.hide))
        assert function["arguments"] == {"who": "Elvira Quist"}, "the request stays as it is"

    def test_schemas_of_answers(self, hiding: Hiding) -> None:
        names = hiding.conversation(["x"])
        assert hide_schema({"const": "Elvira Quist"}, names.hide) == {"const": "Clara Doe"}


@pytest.fixture(scope="module")
def url(llama_folder: Path) -> Iterator[tuple[str, Aparte]]:
    with (
        running_server(llama_folder) as (_, cloud),
        connected(llama_folder, cloud) as model,
        serving(model, hiding=Hiding(NAMES, [find_patterns])) as url,
    ):
        yield url, model


def ask(url: str, path: str = "chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json={"model": NAME, **body}, timeout=30)


class TestServed:
    def test_the_model_sees_stand_ins(self, url: tuple[str, Aparte], hiding: Hiding) -> None:
        _, model = url
        messages = [{"role": "user", "content": "Where is Elvira Quist? Account 20481632."}]
        body = ChatRequest.model_validate_json(json.dumps({"model": NAME, "messages": messages}))
        order = order_chat(model, body, hiding)
        text = model.codec.decode(order.prompts[0])
        assert "Clara Doe" in text
        assert not any(secret in text for secret in SECRETS)

    def test_the_client_sees_names(self, url: tuple[str, Aparte]) -> None:
        """The model is made to write the stand-in, token by token."""
        address, _ = url
        schema = {"enum": ["Elvira Quist said", "Elvira Quist"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "Elvira Quist?"}], "seed": 1, "max_tokens": 60}
        answer = ask(address, **body, response_format=wanted).json()
        assert json.loads(answer["choices"][0]["message"]["content"]).startswith("Elvira Quist")
        assert answer["usage"]["aparte"]["pseudonyms"] == 1
        events = ask(address, **body, response_format=wanted, stream=True, logprobs=True).text
        chunks = [json.loads(line[6:]) for line in events.split("\n\n") if line.startswith("data: {")]
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in chunks)
        assert text == answer["choices"][0]["message"]["content"]
        # Log-probabilities are of the tokens that the model wrote.
        told = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {}).get("content", [])]
        assert "Clara" in "".join(entry["token"] for entry in told)

    def test_names_with_quotes_stay_json(self, llama_folder: Path) -> None:
        names = (Listed('Dwayne "The Rock" Quist', "Clara Doe"),)
        schema = {"const": names[0].name}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with connected(llama_folder, None) as model, serving(model, hiding=Hiding(names, [])) as url:
            body = {"messages": [{"role": "user", "content": names[0].name}], "max_tokens": 60}
            answer = ask(url, **body, response_format=wanted).json()
        assert json.loads(answer["choices"][0]["message"]["content"]) == names[0].name

    def test_a_follow_up_finds_its_beginning(self, url: tuple[str, Aparte]) -> None:
        address, _ = url
        turns = [{"role": "user", "content": "Is Elvira Quist in Zaandam, with 20481632?"}]
        first = ask(address, messages=turns, max_tokens=8, temperature=0).json()
        turns += [first["choices"][0]["message"] | {"content": "Yes."}, {"role": "user", "content": "Sure?"}]
        second = ask(address, messages=turns, max_tokens=2).json()
        assert (
            second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
        )

    def test_completions_are_hidden_too_and_tokens_refused(self, url: tuple[str, Aparte]) -> None:
        address, _ = url
        assert ask(address, "completions", prompt="Elvira Quist", max_tokens=2).status_code == 200
        for prompt in ([1, 2], [[1, 2]]):
            reply = ask(address, "completions", prompt=prompt, max_tokens=2)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "prompt"

    def test_the_card_tells(self, url: tuple[str, Aparte], served: Served) -> None:
        assert httpx.get(f"{url[0]}/v1/models").json()["data"][0]["aparte"]["pseudonyms"] is True
        assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["aparte"]["pseudonyms"] is False
