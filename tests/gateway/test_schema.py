"""The OpenAPI schema is true: requests made from it are answered, or refused, as it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aparte.gateway.app import create_app
from gateway.conftest import Served
from gateway.served import NAME

schemathesis: Any = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


def conformance() -> list[Any]:
    """Status, type and body of an answer are among those that the schema names."""
    from schemathesis.specs.openapi import checks

    return [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]


@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(data=st.data())
def test_every_request_gets_an_answer_that_the_schema_knows(served: Served, data: st.DataObject) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    path = data.draw(st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
    case: Any = data.draw(schema[path]["POST"].as_strategy())
    if isinstance(case.body, dict):
        # Nothing about lengths is to be found out here; half of the requests should get to the model.
        case.body["max_tokens"] = 2
        case.body.pop("max_completion_tokens", None)
        case.body["n"] = 1
        if data.draw(st.booleans()):
            case.body["model"] = NAME
    reply = case.call(base_url=served.url, timeout=30)
    assert reply.status_code < 500, reply.text[:300]
    case.validate_response(reply, checks=[schemathesis.checks.not_a_server_error, *conformance()])
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_it_names_all_that_is_answered(served: Served) -> None:
    schema = create_app(served.model, NAME)._app._app.openapi()  # type: ignore[attr-defined]
    responses = schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "429", "503"} <= set(responses)
    assert "422" not in responses
