"""One cloud and one gateway for most tests of the API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from aparte.api import Aparte
from aparte.cloud.server import MiddleServer
from gateway.served import connected, serving
from running import running_server


@dataclass(frozen=True)
class Served:
    """A gateway, what is behind it, and a client."""

    url: str
    model: Aparte
    server: MiddleServer
    cloud: str
    client: OpenAI


@pytest.fixture(scope="session")
def served(llama_folder: Path) -> Iterator[Served]:
    with (
        running_server(llama_folder) as (server, cloud),
        connected(llama_folder, cloud, sessions=3) as model,
        serving(model, aliases=("gpt-4o",)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(url, model, server, cloud, client)
