"""Conversations that a model writes with itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aparte.bridge.corpus import Shard, write_corpus, write_shard
from aparte.bridge.teacher import Teacher
from aparte.bridge.template import read_template
from aparte.errors import UserError
from aparte.text.tokenizer import Codec
from bridge.conftest import CUT
from tiny import save_tiny, tiny_tokenizer


def test_states_are_those_of_the_model_in_one_piece(
    teacher: Teacher, shard: Shard, llama_folder: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(shard.tokens.long(), output_hidden_states=True).hidden_states
    # Index i is the input of layer i; the last one has been through the norm.
    for name, index in (("front", CUT.front), ("middle", len(teacher.layers) - CUT.back), ("final", -1)):
        kept = getattr(shard, name).float()
        assert torch.allclose(kept, hidden[index], rtol=0.02, atol=0.02), name


def test_every_row_is_a_conversation_of_the_template(shard: Shard, llama_folder: Path) -> None:
    template, tokenizer = read_template(Codec(llama_folder)), tiny_tokenizer()
    for tokens, answer in zip(shard.tokens.tolist(), shard.answer.tolist(), strict=True):
        assert tuple(tokens[: len(template.start)]) == template.start
        text = tokenizer.decode(tokens)
        assert text.startswith("<|im_start|>user\n")
        if "<|im_start|>assistant\n" in text:
            assert any(answer)
        assert not any(answer[: len(template.start)])


def test_greedy_rows_are_the_models_own_continuation(shard: Shard, llama_folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    compared = 0
    for row in range(0, len(shard.tokens), 2):  # every other conversation is answered greedily
        tokens, answer = shard.tokens[row].long(), shard.answer[row]
        with torch.no_grad():
            best = model(tokens[None]).logits[0].argmax(dim=-1)
        places = (answer[1:] & ~torch.isin(tokens[1:], torch.tensor([298, 299]))).nonzero().squeeze(1)
        compared += len(places)
        assert (best[places] == tokens[places + 1]).float().mean() > 0.9  # bfloat16 may tie elsewhere
    assert compared


def test_same_seed_same_conversations(teacher: Teacher, shard: Shard, llama_folder: Path) -> None:
    again = write_shard(teacher, llama_folder, rows=8, length=48, seed=3)
    other = write_shard(teacher, llama_folder, rows=8, length=48, seed=4)
    assert torch.equal(again.tokens, shard.tokens)
    assert not torch.equal(other.tokens, shard.tokens)


def test_a_finished_shard_is_not_written_again(
    teacher: Teacher, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"tokens": 200, "rows": 4, "length": 32, "seed": 1}
    paths = list(write_corpus(teacher, llama_folder, tmp_path, **settings))
    assert len(paths) == 2
    before = [path.read_bytes() for path in paths]
    paths[1].unlink()
    written: list[int] = []
    monkeypatch.setattr(
        "aparte.bridge.corpus.write_shard",
        lambda *args, **kwargs: (written.append(args[4]), write_shard(*args, **kwargs))[1],
    )
    assert list(write_corpus(teacher, llama_folder, tmp_path, **settings)) == paths
    assert written == [2]
    assert [path.read_bytes() for path in paths] == before


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "plain", layers=5)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match="instruction-tuned"):
        read_template(Codec(folder))
