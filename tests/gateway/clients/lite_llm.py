"""litellm; prints what it got."""

import json
import sys

import litellm

base, model, question = sys.argv[1:]
settings = {
    "model": f"openai/{model}",
    "api_base": base,
    "api_key": "none",
    "messages": [{"role": "user", "content": question}],
    "temperature": 0,
    "max_tokens": 12,
}
whole = litellm.completion(**settings)
streamed = "".join(
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(**settings, stream=True)
)
tokens = whole.usage.completion_tokens
print(json.dumps({"whole": whole.choices[0].message.content, "streamed": streamed, "tokens": tokens}))
