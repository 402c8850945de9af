"""The whole way: an official client, the gateway, the emulated network, the cloud."""

from __future__ import annotations

from pathlib import Path

import openai

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
        options = ("--temperature", 0.9, "--seed", 7, "--max-new-tokens", 12)
        numbers = ("--dtype", "float32", "--wire", "float32", "--json")
        written = aparte("generate", llama_folder, QUESTION, "--cloud", far, *options, *numbers).json
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == written["text"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == written["new_tokens"]
    trips = [c.choices[0].aparte for c in chunks if c.choices and hasattr(c.choices[0], "aparte")]  # type: ignore[attr-defined]
    assert len(trips) == chunks[-1].usage.aparte["round_trips"]  # type: ignore[attr-defined]
    assert all(trip["rtt_ms"] >= RTT_MS - 1 for trip in trips)
