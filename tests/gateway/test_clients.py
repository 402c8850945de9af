"""Clients that others wrote for the OpenAI API, as other programs in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.conftest import Served
from gateway.served import NAME

FOLDER = Path(__file__).parent / "clients"
PYTHON = Path(
    os.environ.get(
        "APARTE_CLIENTS_PYTHON", Path(__file__).parents[2] / "build" / "clients" / "bin" / "python"
    )
)
QUESTION = "Why is the sky blue?"
CLIENTS = ("official", "langchain", "llamaindex", "lite_llm")
#: Programs that would ask others for prices and news are told not to.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "*",
    "PYTHONSAFEPATH": "1",
}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="their environment is not there (`make clients`)")


@pytest.fixture(scope="module")
def outputs(served: Served) -> Iterator[dict[str, Any]]:
    """What each of them printed. They take their time to start, so they do it together."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OPENAI"))
    }

    def run(name: str) -> Any:
        words = [str(PYTHON), str(FOLDER / f"{name}.py"), f"{served.url}/v1", NAME, QUESTION]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment | QUIET)
        return done.stdout or done.stderr

    with ThreadPoolExecutor(2) as threads:
        yield dict(zip(CLIENTS, threads.map(run, CLIENTS), strict=True))


@pytest.mark.parametrize("client", CLIENTS)
def test_it_gets_the_same_text(served: Served, outputs: dict[str, Any], client: str) -> None:
    expected = served.model.generate(QUESTION, max_new_tokens=12)
    told = json.loads(outputs[client].splitlines()[-1])
    assert told == {
        "whole": expected.text,
        "streamed": expected.text,
        "tokens": len(expected.token_ids),
    }
