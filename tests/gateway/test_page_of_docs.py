"""What docs/api.md shows runs, adapted to a tiny model."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from aparte.gateway.requests import ChatRequest, CompletionRequest
from gateway.conftest import Served
from gateway.served import NAME

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["client", "library", "transformers"])
def test_its_python(
    block: str, served: Served, llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(llama_folder) if "Aparte" in block else NAME
    code = block.replace("http://127.0.0.1:8000", served.url)
    for cloud in ("ws://127.0.0.1:7600", "ssh://user@gpu.example/7600"):
        code = code.replace(cloud, served.cloud)
    exec(code.replace("smollm2-135m", name), {})
    assert capsys.readouterr().out.strip()


WANTED = ('"chat.completion"', "data: [DONE]", '"aparte"')
CURLS = re.findall(r"^```text\n(curl .*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("shown", "wanted"), list(zip(CURLS, WANTED, strict=True)))
def test_its_curl(served: Served, shown: str, wanted: str) -> None:
    command = shlex.split(shown.replace("\\\n", " "))
    command = [
        word.replace("http://127.0.0.1:8000", served.url).replace("smollm2-135m", NAME) for word in command
    ]
    reply = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert wanted in reply.stdout


def test_it_lists_every_field() -> None:
    fields = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    neutral = {
        "model",
        "parallel_tool_calls",
        "store",
        "service_tier",
        "echo",
        "best_of",
        "stream_options",
    }
    listed = set(re.findall(r"`([^`]+)`", PAGE.split("## What a request may hold")[1].split("\n## ")[0]))
    assert fields - neutral <= listed
