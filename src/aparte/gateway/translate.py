"""From a request to prompts in tokens and :class:`~aparte.options.Options`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aparte.api import Aparte
from aparte.gateway.calling import calling
from aparte.gateway.hiding import Hiding, beginning, hide_message, hide_tool
from aparte.gateway.problems import ApiError, unsupported
from aparte.gateway.requests import ChatRequest, CompletionRequest, Message, Request, ResponseFormat
from aparte.options import Options
from aparte.privacy.pseudonyms import Pseudonyms
from aparte.privacy.structured import hide_schema

#: What the API promises where a request says nothing.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16
_NO_LOGITS = "in draft mode the model's logits stay on the cloud"


@dataclass(frozen=True)
class Order:
    """What is to be written: every prompt ``n`` times."""

    prompts: tuple[tuple[int, ...], ...]
    options: Options
    n: int
    chat: bool
    tools: bool = False
    stream: bool = False
    include_usage: bool = False
    include_sent: bool = False
    #: What stands for what in the prompts.
    names: Pseudonyms | None = None

    def choices(self) -> list[tuple[tuple[int, ...], Options]]:
        """Prompt and options of every choice, in the order of their indices; choice ``i`` of a prompt has the
        seed ``seed + i``."""
        seed = self.options.seed
        return [
            (prompt, replace(self.options, seed=(seed + number) % 2**63))
            for prompt in self.prompts
            for number in range(self.n)
        ]


def order_chat(model: Aparte, request: ChatRequest, hiding: Hiding | None = None) -> Order:
    """Raises :class:`ApiError` that names what can't be had."""
    if not model.codec.has_chat_template:
        raise ApiError(400, "This model has no chat template. Use /v1/completions, which continues text.")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs`.", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError(
            400, "`max_tokens` and `max_completion_tokens` mean the same. Give one.", param="max_tokens"
        )
    schema = _schema(request.response_format)
    messages = [_message(model, message, index) for index, message in enumerate(request.messages)]
    names = None
    call = calling(request)
    if hiding is not None:
        names = hiding.conversation(beginning(messages))
        # In this order a conversation's stand-ins are the same with and without tools.
        messages = [hide_message(message, names.hide) for message in messages]
        call = calling(request, lambda tool: hide_tool(tool, names.hide))
        schema = None if schema is None else hide_schema(schema, names.hide)
    if call.tools and not model.codec.takes_tools:
        raise unsupported("tools", "this model's chat template has no place for them")
    if call.grammar is not None and model.connection.target == "draft":
        raise unsupported(call.because, _NO_LOGITS)
    if call.tools and schema is not None:
        raise ApiError(400, "`response_format` and `tools` can't be had together.", param="response_format")
    prompt = model.codec.encode_chat(messages, call.tools or None)
    limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    options = _options(request, limit or model.max_context, top, names)
    options = replace(
        options, grammar=call.grammar, json_schema=None if schema is None else json.dumps(schema)
    )
    return _order(model, request, [prompt], options, names, chat=True, tools=bool(call.tools))


def order_completion(model: Aparte, request: CompletionRequest, hiding: Hiding | None = None) -> Order:
    """Raises :class:`ApiError` that names what can't be had."""
    prompts: list[list[int]] = []
    given: list[Any] = [request.prompt] if isinstance(request.prompt, str) else list(request.prompt)
    if given and isinstance(given[0], int):
        given = [given]
    names = None
    if hiding is not None:
        if not all(isinstance(prompt, str) for prompt in given):
            raise ApiError(
                400,
                "`prompt` is tokens, and this gateway replaces names in text (--pseudonyms). Give text.",
                param="prompt",
            )
        names = hiding.conversation(given)
        given = [names.hide(prompt) for prompt in given]
    for prompt in given:
        tokens = model.codec.encode(prompt) if isinstance(prompt, str) else prompt
        if not all(0 <= token < model.vocab_size for token in tokens):
            raise ApiError(400, "`prompt` holds a token that the model does not have.", param="prompt")
        if not tokens:
            raise ApiError(400, "`prompt` is empty: there is nothing to continue.", param="prompt")
        prompts.append(tokens)
    options = _options(request, request.max_tokens or DEFAULT_COMPLETION_TOKENS, request.logprobs, names)
    return _order(model, request, prompts, options, names, chat=False)


def _order(
    model: Aparte,
    request: Request,
    prompts: list[list[int]],
    options: Options,
    names: Pseudonyms | None,
    *,
    chat: bool,
    tools: bool = False,
) -> Order:
    for prompt in prompts:
        if len(prompt) >= model.max_context:
            raise ApiError(
                400,
                f"The prompt has {len(prompt)} tokens, the model's context {model.max_context}. Shorten it.",
                param="messages" if chat else "prompt",
                code="context_length_exceeded",
            )
    if model.connection.target == "draft" and (name := options.needs_logits) is not None:
        name = "response_format" if name == "json_schema" else name
        raise unsupported(name, _NO_LOGITS)
    if any(token >= model.vocab_size for token, _ in options.logit_bias):
        raise ApiError(400, "`logit_bias` names a token that the model does not have.", param="logit_bias")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "`stream_options` needs `stream`.", param="stream_options")
    wanted = request.stream_options
    return Order(
        tuple(map(tuple, prompts)),
        options,
        request.n or 1,
        chat,
        tools,
        bool(request.stream),
        include_usage=bool(wanted and wanted.include_usage),
        include_sent=bool(wanted and wanted.include_sent),
        names=names,
    )


def _options(request: Request, limit: int, top: int | None, names: Pseudonyms | None) -> Options:
    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    hide: Callable[[str], str] = str if names is None else names.hide
    return Options(
        max_new_tokens=limit,
        temperature=given(request.temperature, DEFAULT_TEMPERATURE),
        top_p=given(request.top_p, Options.top_p),
        top_k=max(0, given(request.top_k, Options.top_k)),
        min_p=given(request.min_p, Options.min_p),
        seed=given(request.seed, secrets.randbelow(2**63)),
        stop=tuple(map(hide, stop)),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        top_logprobs=top,
    )


def _schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise ApiError(400, "`response_format.json_schema` is missing.", param="response_format.json_schema")
    return wanted.json_schema.schema_


def _message(model: Aparte, message: Message, index: int) -> dict[str, Any]:
    """A turn as chat templates take it."""
    where = f"messages[{index}]"
    uses_tools = message.tool_calls or message.role == "tool" or message.tool_call_id
    if uses_tools and not model.codec.takes_tools:
        raise unsupported(
            f"{where}.tool_calls" if message.tool_calls else where,
            "this model's chat template has no place for tools",
        )
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"`{where}.content` is missing.", param=f"{where}.content")
    if message.tool_calls and message.role != "assistant":
        raise ApiError(
            400, f"`{where}.tool_calls`: only an assistant calls tools.", param=f"{where}.tool_calls"
        )
    if message.tool_call_id and message.role != "tool":
        raise ApiError(
            400, f"`{where}.tool_call_id` belongs to a tool's turn.", param=f"{where}.tool_call_id"
        )
    turn: dict[str, Any] = {
        # What OpenAI calls a developer, templates call the system.
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, where),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{where}.tool_calls"
        raise ApiError(400, f"`{param}`: the arguments are not a JSON object.", param=param)
    return arguments
