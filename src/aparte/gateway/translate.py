"""From a request to prompts in tokens and :class:`~aparte.options.Options`."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from typing import Any

from aparte.api import Aparte
from aparte.gateway.problems import ApiError, unsupported
from aparte.gateway.requests import ChatRequest, CompletionRequest, Message, Request, ResponseFormat
from aparte.options import Options

#: What the API promises where a request says nothing.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16


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

    def choices(self) -> list[tuple[tuple[int, ...], Options]]:
        """Prompt and options of every choice, in the order of their indices; choice ``i`` of a prompt has the
        seed ``seed + i``."""
        seed = self.options.seed
        return [
            (prompt, replace(self.options, seed=(seed + number) % 2**63))
            for prompt in self.prompts
            for number in range(self.n)
        ]


def order_chat(model: Aparte, request: ChatRequest) -> Order:
    """Raises :class:`ApiError` that names what can't be had."""
    if not model.codec.has_chat_template:
        raise ApiError(400, "This model has no chat template. Use /v1/completions, which continues text.")
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    if request.tool_choice == "none":
        tools = []
    if tools and not model.codec.takes_tools:
        raise unsupported("tools", "this model's chat template has no place for them")
    if request.parallel_tool_calls and not tools:
        raise ApiError(400, "`parallel_tool_calls` belongs to `tools`.", param="parallel_tool_calls")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs`.", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError(
            400, "`max_tokens` and `max_completion_tokens` mean the same. Give one.", param="max_tokens"
        )
    schema = _schema(request.response_format)
    if schema is not None and tools:
        raise ApiError(400, "`response_format` and `tools` can't be had together.", param="response_format")
    messages = [_message(model, message, index) for index, message in enumerate(request.messages)]
    prompt = model.codec.encode_chat(messages, tools or None)
    limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    options = _options(request, limit or model.max_context, top, schema)
    return _order(model, request, [prompt], options, chat=True, tools=bool(tools))


def order_completion(model: Aparte, request: CompletionRequest) -> Order:
    """Raises :class:`ApiError` that names what can't be had."""
    prompts: list[list[int]] = []
    given: list[Any] = [request.prompt] if isinstance(request.prompt, str) else list(request.prompt)
    if given and isinstance(given[0], int):
        given = [given]
    for prompt in given:
        tokens = model.codec.encode(prompt) if isinstance(prompt, str) else prompt
        if not all(0 <= token < model.vocab_size for token in tokens):
            raise ApiError(400, "`prompt` holds a token that the model does not have.", param="prompt")
        if not tokens:
            raise ApiError(400, "`prompt` is empty: there is nothing to continue.", param="prompt")
        prompts.append(tokens)
    options = _options(request, request.max_tokens or DEFAULT_COMPLETION_TOKENS, request.logprobs, None)
    return _order(model, request, prompts, options, chat=False)


def _order(
    model: Aparte,
    request: Request,
    prompts: list[list[int]],
    options: Options,
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
        raise unsupported(name, "in draft mode the model's logits stay on the cloud")
    if any(token >= model.vocab_size for token, _ in options.logit_bias):
        raise ApiError(400, "`logit_bias` names a token that the model does not have.", param="logit_bias")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "`stream_options` needs `stream`.", param="stream_options")
    include = bool(request.stream_options and request.stream_options.include_usage)
    return Order(
        tuple(map(tuple, prompts)), options, request.n or 1, chat, tools, bool(request.stream), include
    )


def _options(request: Request, limit: int, top: int | None, schema: str | None) -> Options:
    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return Options(
        max_new_tokens=limit,
        temperature=given(request.temperature, DEFAULT_TEMPERATURE),
        top_p=given(request.top_p, Options.top_p),
        top_k=max(0, given(request.top_k, Options.top_k)),
        min_p=given(request.min_p, Options.min_p),
        seed=given(request.seed, secrets.randbelow(2**63)),
        stop=stop,
        frequency_penalty=given(request.frequency_penalty, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        top_logprobs=top,
        json_schema=schema,
    )


def _schema(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json.dumps({"type": "object"})
    if wanted.json_schema is None:
        raise ApiError(400, "`response_format.json_schema` is missing.", param="response_format.json_schema")
    return json.dumps(wanted.json_schema.schema_)


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
