"""The official client: whole, streamed, asynchronous; prints what it got."""

import asyncio
import json
import sys

import openai

base, model, question = sys.argv[1:]
settings = {
    "model": model,
    "messages": [{"role": "user", "content": question}],
    "temperature": 0,
    "max_tokens": 12,
}


async def streamed() -> str:
    async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
        stream = await client.chat.completions.create(**settings, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


with openai.OpenAI(base_url=base, api_key="none") as client:
    whole = client.chat.completions.create(**settings)
tokens = whole.usage.completion_tokens
text = whole.choices[0].message.content
print(json.dumps({"whole": text, "streamed": asyncio.run(streamed()), "tokens": tokens}))
