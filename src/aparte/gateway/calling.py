"""``tool_choice`` as a grammar: what the model may write of calls, and what it has to.

Calls are JSON in ``<tool_call>`` tags (:mod:`aparte.gateway.tools`). A grammar is only made where something
is demanded that a model left to itself might not keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aparte.gateway.problems import ApiError
from aparte.gateway.requests import ChatRequest, NamedTool
from aparte.gateway.tools import CLOSE, OPEN


@dataclass(frozen=True)
class Calling:
    """The tools that the model is told of, and the grammar of its answer if there has to be one.

    ``because`` is the field of the request that needs the grammar.
    """

    tools: tuple[dict[str, Any], ...] = ()
    grammar: str | None = None
    because: str = ""


def calling(request: ChatRequest, told: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Calling:
    """``told`` makes of a tool what the model is to see of it. Raises :class:`ApiError` that names what
    cannot be."""
    tools, choice = request.tools or [], request.tool_choice
    if request.parallel_tool_calls is not None and not tools:
        raise ApiError(400, "`parallel_tool_calls` belongs to `tools`.", param="parallel_tool_calls")
    if not tools and choice not in (None, "auto", "none"):
        raise ApiError(400, "`tool_choice` asks for a call, and there are no `tools`.", param="tool_choice")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "`tools` has two functions of one name. Rename one.", param="tools")
    if choice == "none" or not tools:
        return Calling()
    described = tuple(told(tool.model_dump(exclude_none=True)) for tool in tools)
    schemas = [_schema(tool["function"].get("parameters"), number) for number, tool in enumerate(described)]
    several = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise ApiError(400, "`tool_choice` names a function that is not in `tools`.", param="tool_choice")
        which = names.index(choice.function.name)
        rules = ["start: OPEN body", *_bodies(names[which : which + 1], schemas[which : which + 1])]
        return Calling(described, "\n".join(rules), "tool_choice")
    if choice == "required":
        start = 'start: call ("\\n" call)*' if several else "start: call"
        rules = [start, "call: OPEN body", *_bodies(names, schemas)]
        return Calling(described, "\n".join(rules), "tool_choice")
    strict = next((number for number, tool in enumerate(tools) if tool.function.strict), None)
    if strict is None and several:
        return Calling(described)
    rules = [
        "start: call* TEXT" if several else "start: call | TEXT",
        "call: head body",
        # Lazy: where a call opens, text has ended.
        f"head[lazy]: TEXT {json.dumps(OPEN)}",
        r"TEXT: /(.|\n)*/",
        *_bodies(names, [schemas[n] if tool.function.strict else _ANY for n, tool in enumerate(tools)]),
    ]
    because = "parallel_tool_calls" if strict is None else f"tools[{strict}].function.strict"
    return Calling(described, "\n".join(rules), because)


_ANY: dict[str, Any] = {"type": "object"}
#: Spaces as models put them, and no more: a model may not be able to stop writing them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: As OpenAI has it: a function without parameters takes none.
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _schema(given: dict[str, Any] | None, number: int) -> dict[str, Any]:
    """Of the arguments, which are an object."""
    if not given:
        return _NOTHING
    if given.get("type", "object") != "object":
        param = f"tools[{number}].function.parameters"
        raise ApiError(400, f"`{param}` is not the schema of an object.", param=param)
    return {"type": "object", **given}


def _bodies(names: Sequence[str], schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Rules for what stands in the tags, and for the tag that ends it."""
    rules = [f"OPEN: {json.dumps(OPEN)}", "body: " + " | ".join(f"call_{n}" for n in range(len(names)))]
    for number, (name, schema) in enumerate(zip(names, schemas, strict=True)):
        begin = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        end = json.dumps(f"}}\n{CLOSE}")
        rules.append(f"call_{number}: {begin} %json {json.dumps(schema | {'x-guidance': _SPACING})} {end}")
    return rules
