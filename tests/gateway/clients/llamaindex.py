"""LlamaIndex's class for what is like OpenAI; prints what it got."""

import json
import sys

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike

base, model, question = sys.argv[1:]
chat = OpenAILike(
    api_base=base,
    api_key="none",
    model=model,
    temperature=0,
    max_tokens=12,
    is_chat_model=True,
    context_window=512,
)
turn = [ChatMessage(role="user", content=question)]
whole = chat.chat(turn)
streamed = [chunk.message.content for chunk in chat.stream_chat(turn)][-1]
tokens = whole.raw.usage.completion_tokens
print(json.dumps({"whole": whole.message.content, "streamed": streamed, "tokens": tokens}))
