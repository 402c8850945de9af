"""The requests: exactly the fields that have an effect. Anything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: Most choices per request and most stop strings.
MOST_CHOICES = 16
MOST_STOPS = 16

Text = Annotated[str, Field(max_length=4_000_000)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class Body(BaseModel):
    """Nothing is converted, and unknown fields are refused; a null is as good as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class TextPart(Body):
    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Annotated[Text, Field(description="A JSON object, as a string.")]


class ToolCall(Body):
    id: Annotated[str, Field(max_length=200)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None
    #: Clients that send an answer back send these along, empty.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]


class NamedTool(Body):
    """The one function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class Schema(Body):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: Annotated[str, Field(max_length=64)]
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_sent: Annotated[
        bool | None, Field(description="Tell with each chunk what the cloud was sent; an extension.")
    ] = None


class Request(Body):
    """What both ways of asking have in common."""

    model: Annotated[str, Field(min_length=1, max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1000000, description="0 and -1 are off.")] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=10000000)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    #: For a provider to tell its customer's users apart; there is nobody here to tell.
    user: Annotated[str, Field(max_length=1000)] | None = None


class ChatRequest(Request):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=10000000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionRequest(Request):
    """``POST /v1/completions``"""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=64)]
        | Annotated[list[int], Field(min_length=1, max_length=1000000)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=64)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
