"""The official OpenAI client against a gateway on this machine (`aparte gateway MODEL --cloud URL`).

    python examples/openai_client.py MODEL [BASE_URL]

BASE_URL is http://127.0.0.1:8000/v1 unless given.
"""

import sys

from openai import OpenAI, OpenAIError


def main(model: str, base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            took = chunk.usage.model_extra["aparte"]
            print(f"\n{chunk.usage.completion_tokens} tokens in {took['round_trips']} round trips")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except OpenAIError as error:
        sys.exit(f"Error: {error}")
