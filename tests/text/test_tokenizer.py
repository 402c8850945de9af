from __future__ import annotations

import json
from pathlib import Path

import pytest

from aparte.errors import CheckpointError, UserError
from aparte.text.tokenizer import Codec
from tiny import save_tiny

MESSAGES = [{"role": "user", "content": "the cat"}]


def test_chats_are_encoded_once_by_the_template(llama_folder: Path) -> None:
    from transformers import AutoTokenizer

    codec = Codec(llama_folder)
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert codec.encode_chat(MESSAGES) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", ["the cat", " leading", "naïve 🙂\n\ttab", ""])
def test_text_round_trips(llama_folder: Path, text: str) -> None:
    codec = Codec(llama_folder)
    assert codec.decode(codec.encode(text)) == text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 7}}, {5, 6}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, {7}),
        ({"generation_config.json": {"eos_token_id": 0}}, {0}),
    ],
)
def test_end_tokens_come_from_the_most_specific_place(
    tmp_path: Path, files: dict[str, object], expected: set[int]
) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    for name, values in files.items():
        data = json.loads((folder / name).read_text()) if name == "config.json" else {}
        (folder / name).write_text(json.dumps(data | values))  # type: ignore[operator]
    assert Codec(folder).eos == expected


def test_a_model_without_template_asks_for_raw(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="--raw"):
        Codec(folder).encode_chat(MESSAGES)


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        Codec(folder).encode_chat(MESSAGES)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version":')
    with pytest.raises(CheckpointError, match=r"tokenizer.*download the model again"):
        Codec(folder)
