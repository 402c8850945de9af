"""Pseudonyms within JSON: its strings are text, its keys and a schema's own words are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

#: Keys of a JSON schema whose values are words of its own, or names of its parts.
_NO_TEXT = frozenset(("type", "format", "required", "$ref", "$id", "$schema", "$anchor", "$dynamicRef"))
#: And those whose values are the schema's subject, whatever they look like.
_VALUES = frozenset(("default", "enum", "const", "examples"))


def hide_schema(schema: Any, hide: Callable[[str], str]) -> Any:
    """Descriptions, choices and examples; names of properties stay, they are the program's."""
    return each_text(schema, hide, skip=_NO_TEXT)


def in_json(original: str) -> str:
    """How an original is spelled inside of a string of JSON."""
    return json.dumps(original, ensure_ascii=False)[1:-1]


def each_text(value: Any, change: Callable[[str], str], skip: frozenset[str] = frozenset()) -> Any:
    """JSON with every string changed but keys, and the words of a schema under the keys in ``skip``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [each_text(one, change, skip) for one in value]
    if isinstance(value, dict):
        return {
            key: one
            if key in skip and not isinstance(one, dict)  # else it is a property of that name
            else each_text(one, change, frozenset() if key in _VALUES else skip)
            for key, one in value.items()
        }
    return value
