"""LangChain's class for OpenAI; prints what it got."""

import json
import sys

from langchain_openai import ChatOpenAI

base, model, question = sys.argv[1:]
chat = ChatOpenAI(base_url=base, api_key="none", model=model, temperature=0, max_tokens=12)
whole = chat.invoke(question)
streamed = "".join(chunk.content for chunk in chat.stream(question))
tokens = whole.usage_metadata["output_tokens"]
print(json.dumps({"whole": whole.content, "streamed": streamed, "tokens": tokens}))
