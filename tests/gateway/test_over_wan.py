"""The whole way: an official client, the gateway, the emulated network, the cloud."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from aparte.address import format_address, parse_address
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process
from cli.command import Command
from gateway.served import NAME, connected, serving
from running import running_server

QUESTION = "Why is the sky over the sea in the morning of another colour?"
RTT_MS = 80.0


def test_streamed_at_80_ms_as_generate_writes_it_with_the_same_seed(
    llama_folder: Path, aparte: Command
) -> None:
    with (
        running_server(llama_folder) as (_, cloud),
        wan_process(parse_address(cloud.removeprefix("ws://")), WanProfile(rtt_ms=RTT_MS)) as there,
        connected(llama_folder, far := f"ws://{format_address(there)}", sessions=1) as model,
        serving(model) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        started = time.perf_counter()
        stream = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0.9,
            seed=7,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        waited_s = time.perf_counter() - started
        numbers = httpx.get(f"{url}/metrics").text
        options = ("--temperature", 0.9, "--seed", 7, "--max-new-tokens", 12)
        formats = ("--dtype", "float32", "--wire", "float32", "--json")
        written = aparte("generate", llama_folder, QUESTION, "--cloud", far, *options, *formats).json
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == written["text"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == written["new_tokens"]
    trips = [c.choices[0].aparte for c in chunks if c.choices and hasattr(c.choices[0], "aparte")]  # type: ignore[attr-defined]
    assert len(trips) == chunks[-1].usage.aparte["round_trips"]  # type: ignore[attr-defined]
    assert all(trip["rtt_ms"] >= RTT_MS - 1 for trip in trips)
    where_time_went(chunks[-1].usage.aparte, trips, waited_s)  # type: ignore[attr-defined]
    counted = {
        part: float(value)
        for part, value in re.findall(
            r'^aparte_gateway_time_seconds_total{part="(\w+)"} (\S+)$', numbers, re.M
        )
    }
    whole = re.search(r"^aparte_gateway_answer_seconds_sum (\S+)$", numbers, re.M)
    assert whole is not None
    assert sum(counted.values()) == pytest.approx(float(whole[1]), rel=0.02)
    assert set(counted) == {"latency", "up", "down", "device", "codec", "cloud", "queue", "rest"}
    parts = chunks[-1].usage.aparte["parts"]  # type: ignore[attr-defined]
    assert counted["latency"] == pytest.approx(parts["latency_ms"] / 1e3, abs=1e-3)


def where_time_went(told: dict[str, Any], trips: list[dict[str, Any]], waited_s: float) -> None:
    """The parts add up to the wall time within 2 %, the network's being what the link was made to take."""
    parts = {name: ms for name, ms in told["parts"].items() if name not in ("mbps", "total_ms")}
    total_ms = told["parts"]["total_ms"]
    assert sum(parts.values()) == pytest.approx(total_ms, abs=0.01)
    assert total_ms == pytest.approx(1e3 * told["elapsed_s"], rel=0.02)
    assert 0.8 * waited_s <= told["elapsed_s"] <= waited_s + 0.02
    assert min(parts.values()) >= 0
    network_ms = parts["latency_ms"] + parts["up_ms"] + parts["down_ms"]
    assert network_ms >= 0.9 * RTT_MS * sum(trip["parts"]["latency_ms"] > RTT_MS / 2 for trip in trips)
    assert sum(trip["parts"]["total_ms"] for trip in trips) <= total_ms + 0.01 * len(trips)
