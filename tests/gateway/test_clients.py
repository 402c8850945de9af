"""Clients that others wrote for the OpenAI API, unchanged."""

from __future__ import annotations

import pytest

from gateway.conftest import Served
from gateway.served import NAME

QUESTION = "Why is the sky blue?"


def expected(served: Served) -> str:
    return served.model.generate(QUESTION, max_new_tokens=12).text


def test_langchain(served: Served) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    chat = langchain.ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model=NAME, temperature=0, max_tokens=12
    )
    assert chat.invoke(QUESTION).content == expected(served)
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == expected(served)


def test_llama_index(served: Served) -> None:
    llms = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index is not installed")
    from llama_index.core.base.llms.types import ChatMessage

    chat = llms.OpenAILike(
        api_base=f"{served.url}/v1",
        api_key="none",
        model=NAME,
        temperature=0,
        max_tokens=12,
        is_chat_model=True,
        context_window=512,
    )
    turn = [ChatMessage(role="user", content=QUESTION)]
    assert chat.chat(turn).message.content == expected(served)
    assert list(chat.stream_chat(turn))[-1].message.content == expected(served)


def test_litellm(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks for prices on the network
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    settings = {
        "model": f"openai/{NAME}",
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 12,
    }
    assert litellm.completion(**settings).choices[0].message.content == expected(served)
    chunks = litellm.completion(**settings, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(served)
